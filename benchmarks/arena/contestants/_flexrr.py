"""FlexRR: an equal split, and pieces of work that move to faster workers inside the step."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, final

import torch.distributed as dist

from benchmarks._stealing import Stealing
from benchmarks.arena._world import World, flat_gradient, set_gradient
from benchmarks.arena.contestants._foreman import Ask, foreman
from evenstep.claims import Chunk


@final
@dataclass(frozen=True, slots=True)
class FlexRr:
    """Work stealing by FlexRR's numbers, in real time; the rule is ``benchmarks._stealing``.

    A worker asks what to compute next, and its device takes the time of that chunk. The fixed
    cost of a step is paid once, with its first chunk: kinder than a GPU, on which every forward
    has one. The gradients of all its chunks are computed together at the end, which changes no
    sum, and one all-reduce adds up those of all ranks. So each update is exact.

    Args:
        scheme: when a worker that lags hands over how much.
    """

    is_exact: ClassVar[bool] = True
    num_servers: ClassVar[int] = 0

    scheme: Stealing

    def train(self, world: World) -> Generator[None]:
        setup, model = world.setup, world.network()
        optimizer, total = world.optimizer(model), setup.global_batch_size
        with foreman(self.scheme, setup.equal, world.rank) as ask:
            yield
            for step in range(world.max_steps):
                chunks = _computed(world, ask)
                for chunk in chunks:
                    first, size = step * total + chunk.start, chunk.num_samples
                    (world.loss(model, first, size) * (size / total)).backward()
                gradient = flat_gradient(model)
                dist.all_reduce(gradient)
                set_gradient(model, gradient)
                world.device.exchange()
                optimizer.step()
                optimizer.zero_grad()
                world.updated(model, total)
                yield


def _computed(world: World, ask: Ask) -> list[Chunk]:
    """Have the device compute chunk after chunk, and return them joined where they touch."""
    done: list[Chunk] = []
    chunk, num_done, speed = ask(None), 0, None
    while chunk is not None:
        began_s, size = world.clock.now_s, chunk.num_samples
        world.device.compute(size, began_s, after=num_done)
        if num_done:  # without the fixed cost of the step
            speed = size / (world.clock.now_s - began_s)
        num_done += size
        if done and done[-1].stop == chunk.start:
            done[-1] = Chunk(done[-1].start, chunk.stop)
        else:
            done.append(chunk)
        chunk = ask(speed)
    return done
