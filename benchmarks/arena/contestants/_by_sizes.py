"""DDP with sizes that a person chose, weighted so that the gradient stays exact."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, final

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.arena._world import World


@final
@dataclass(frozen=True, slots=True)
class BySizes:
    r"""Each worker takes the same number of samples at every step; those with none stay out.

    Equal sizes are plain DDP. One size alone is the fastest worker by itself, without exchange.
    The loss of a worker with $b_i$ of $B$ samples counts $b_i K / B$, so that DDP's mean over $K$
    workers is the mean over the global batch: what a careful user writes by hand.

    Args:
        batch_size: samples of every worker.
    """

    is_exact: ClassVar[bool] = True
    num_servers: ClassVar[int] = 0

    batch_size: tuple[int, ...]

    def train(self, world: World) -> Generator[None]:
        ranks = [rank for rank, size in enumerate(self.batch_size) if size]
        group = dist.new_group(ranks)
        if world.rank not in ranks:
            for _ in range(world.max_steps + 1):
                yield
            return
        total, size = sum(self.batch_size), self.batch_size[world.rank]
        first = sum(self.batch_size[: world.rank])
        model = DistributedDataParallel(world.model(), process_group=group)
        optimizer = world.optimizer(model)
        yield
        for step in range(world.max_steps):
            weight = size * len(ranks) / total
            (weight * world.loss(model, step * total + first, size)).backward()
            if len(ranks) > 1:
                world.device.exchange()
            optimizer.step()
            optimizer.zero_grad()
            world.updated(model, total)
            yield
