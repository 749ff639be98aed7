"""Local SGD: steps alone, then the mean of all parameters."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch.distributed as dist

from benchmarks._local_sgd import LocalSgd
from benchmarks.arena._world import World, all_ranks, flat, set_parameters


@final
@dataclass(frozen=True, slots=True)
class LocalSteps:
    r"""$H_i$ steps of $B / K$ samples on each worker, then $w = \sum_i h_i w_i$.

    The rule is ``benchmarks._local_sgd.LocalSgd``: $H_i = H$ or, by speed, as many as fit while
    the slowest takes $H$, from each worker's seconds per step in the round before; the first
    round takes $H$ everywhere. $h_i$ is a worker's share of the samples of the round. With
    $H = 1$ it is plain DDP, up to rounding.

    Args:
        rule: how many steps each worker takes, and what its parameters weigh.
    """

    is_exact: ClassVar[bool] = False
    num_servers: ClassVar[int] = 0

    rule: LocalSgd

    def train(self, world: World) -> Generator[None]:
        rank, size = world.rank, world.setup.global_batch_size // world.setup.world_size
        sizes = np.full(world.setup.world_size, size)
        model = world.model()
        optimizer = world.optimizer(model)
        steps, first = self.rule.local_steps(np.ones(world.setup.world_size)), 0
        yield
        while first + int(steps @ sizes) <= len(world.order):
            mine = first + size * int(steps[:rank].sum())
            began_s = world.clock.now_s
            for step in range(int(steps[rank])):
                world.loss(model, mine + step * size, size).backward()
                optimizer.step()
                optimizer.zero_grad()
            step_s = all_ranks((world.clock.now_s - began_s) / int(steps[rank]))
            mean = flat(model) * float(self.rule.weights(steps, sizes)[rank])
            dist.all_reduce(mean)
            set_parameters(model, mean)
            world.device.exchange()
            world.updated(model, int(steps @ sizes))
            first += int(steps @ sizes)
            steps = self.rule.local_steps(np.array(step_s))
            yield
