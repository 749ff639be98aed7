"""What workers run whose memory is emulated: forwards of too many samples raise torch's error."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime

from .models import WithBuffers
from .plans import Restless

B, NUM_STEPS, WORLD_SIZE = 48, 8, 3
QUIET = Runtime(line_every=None)


def samples():
    """Return features, targets, and each sample's own number."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B * NUM_STEPS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(5, (len(x),), generator=generator), torch.arange(len(x)))


def alone():
    """Return the parameters that one process has after the epoch, with torch's own loader."""
    model, optimizer = _fresh()
    for x, y, _ in DataLoader(samples(), batch_size=B):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train(rank, where, most, *, bounds=None, sizes=None):
    """Return parameters, the samples that counted here, forward sizes and caps after an epoch.

    Rank 0 holds ``most`` samples in the ``"forward"``, or breaks off in the ``"backward"`` of the
    first forward that has more.
    """
    model, optimizer = _fresh()
    loader = DataLoader(samples(), batch_size=B // WORLD_SIZE)
    policy = Restless() if sizes is None else Fixed(sizes)
    seen, tried, broken = [], [], []
    with Balancer(B, policy=policy, bounds=bounds or Bounds(), runtime=QUIET) as balancer:
        net, loader = balancer.prepare(DistributedDataParallel(model), loader)

        def closure(batch):
            x, y, _ = batch
            tried.append(len(x))
            if rank == 0 and where == "forward" and len(x) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            loss = nn.functional.cross_entropy(net(x), y)
            if rank == 0 and where == "late" and len(x) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss

        def through(loss):
            if rank == 0 and where == "backward" and tried[-1] > most and not broken:
                broken.append(True)
                list(model.parameters())[-1].grad = torch.ones(5, dtype=torch.float64)
                raise torch.OutOfMemoryError("CUDA out of memory")
            loss.backward()

        for step in loader.steps():
            step.backward(closure, through=through)
            seen += [
                int(n) for part in step.micro_batches if part.num_samples for n in part.batch[2]
            ]
            optimizer.step()
            optimizer.zero_grad()
        plan = balancer._link.plan()
        caps = None if plan.max_forward is None else plan.max_forward[0]
    return [p.detach() for p in model.parameters()], seen, tried, caps


def _fresh():
    torch.manual_seed(0)
    model = WithBuffers().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
