"""Plain DDP: a quarter of the global batch on each worker."""

from __future__ import annotations

import torch.distributed as dist
from _task import GLOBAL_BATCH_SIZE, WORLD_SIZE, Rank
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train as DDP's tutorial does."""
    rank = Rank()
    dist.init_process_group("gloo", rank=rank.rank, world_size=WORLD_SIZE)
    device = rank.model()
    model = DistributedDataParallel(device)
    optimizer = rank.optimizer(model.parameters())
    sampler = DistributedSampler(rank.train, seed=rank.setting.seed)
    loader = DataLoader(rank.train, batch_size=GLOBAL_BATCH_SIZE // WORLD_SIZE, sampler=sampler)
    for epoch in range(rank.setting.num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    rank.done(device, rank.setting.num_steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
