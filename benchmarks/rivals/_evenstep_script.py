"""evenstep's `auto`: the script of plain DDP and three lines."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _task import GLOBAL_BATCH_SIZE, WORLD_SIZE, Rank
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from evenstep.torch import Balancer, Runtime


def main() -> None:
    """Train as the README does."""
    rank = Rank()
    dist.init_process_group("gloo", rank=rank.rank, world_size=WORLD_SIZE)
    device = rank.model()
    model = DistributedDataParallel(device)
    optimizer = rank.optimizer(model.parameters())
    loader = DataLoader(
        rank.train,
        batch_size=GLOBAL_BATCH_SIZE // WORLD_SIZE,
        shuffle=True,
        generator=torch.Generator().manual_seed(rank.setting.seed),
    )
    with Balancer(runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model, loader)
        for _ in range(rank.setting.num_epochs):
            for x, y in loader:
                cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        rank.done(device, rank.setting.num_steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
