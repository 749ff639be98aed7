"""A training that a cluster may interrupt: it leaves a checkpoint, and continues from it later.

It takes rank and addresses from the environment, as torchrun, SLURM or Kubernetes set them:
`torchrun --standalone --nproc-per-node 2 examples/on_a_cluster.py`. See docs/recipes.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.torch import Balancer, Checkpoint, Drain

NOT_FINISHED = 75  # EX_TEMPFAIL of sysexits.h: start me again


def options():
    """What the command line asks for; all of it has a default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--global-batch-size", type=int, default=96)
    parser.add_argument("--checkpoints", default="checkpoints", help="a folder that all nodes see")
    return parser.parse_args()


def device_of_this_rank():
    """The card that LOCAL_RANK gives, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


def products(num_samples):
    """Made-up data: the target is a sum of products that a linear model cannot learn."""
    x = torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, :8] * x[:, 8:]).sum(dim=1, keepdim=True))


def train(args, device):
    """Train on from the last checkpoint, and return the step that was reached."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch_size = -(-args.global_batch_size // dist.get_world_size())
    loader = DataLoader(products(9600), batch_size, shuffle=True)

    with Balancer(args.global_batch_size) as balancer, Drain(balancer) as drain:
        model, loader = balancer.prepare(model, loader)
        checkpoint = Checkpoint(
            args.checkpoints, model=model, optimizer=optimizer, loader=loader, balancer=balancer
        )
        step = checkpoint.load() or 0
        say("begins at step", step)
        while step < args.steps:
            for x, y in loader:
                F.mse_loss(model(x.to(device)), y.to(device)).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                is_last = drain.requested or step == args.steps
                if is_last or step % args.save_every == 0:
                    checkpoint.save(step)
                    say("saved step", step)
                if is_last:
                    return step
        return step


def say(*words):
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def main():
    args, device = options(), device_of_this_rank()
    dist.init_process_group()
    step = train(args, device)
    dist.destroy_process_group()
    if step < args.steps:
        sys.exit(NOT_FINISHED)  # 0 would tell the scheduler that the job is done


if __name__ == "__main__":
    main()
