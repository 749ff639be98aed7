"""Workers that push gradients to one server and pull its model, each at its own pace."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.distributed as dist

from benchmarks.arena._world import World, flat, flat_gradient, set_gradient, set_parameters
from benchmarks.arena.contestants._push_rules import Pushes, PushRule


@final
@dataclass(frozen=True, slots=True)
class ParameterServer:
    """A server on the rank past the workers; what it does with a gradient is the rule's.

    Worker i reads its own slice of every global batch, as in plain DDP, so a fast one is ahead
    in the order. A push and the answer take one exchange of the set-up, on the worker.

    Args:
        rule: when a gradient is used, and when its worker goes on.
    """

    is_exact: ClassVar[bool] = False
    num_servers: ClassVar[int] = 1

    rule: PushRule

    def train(self, world: World) -> Generator[None]:
        yield
        if world.rank == world.setup.world_size:
            self._serve(world)
        else:
            self._work(world)
        dist.barrier()  # no push of the next contestant may reach this server
        yield

    def _work(self, world: World) -> None:
        server = world.setup.world_size
        size = world.setup.global_batch_size // server
        model = world.model()
        answer = torch.empty(flat(model).numel() + 1)
        for step in range(world.max_steps):
            first = step * world.setup.global_batch_size + world.rank * size
            world.loss(model, first, size).backward()
            dist.send(flat_gradient(model), server)
            dist.recv(answer, server)
            if answer[-1]:
                return
            world.device.exchange()
            set_parameters(model, answer[:-1])
            model.zero_grad()
        raise RuntimeError(f"{world.max_steps} steps were too few for {world.duration_s} s")

    def _serve(self, world: World) -> None:
        """Take gradients until the time is over, then end each worker at its next push."""
        model = world.network()
        optimizer = world.optimizer(model)
        size = world.setup.global_batch_size // world.setup.world_size
        gradient, pushes = torch.empty_like(flat(model)), Pushes.start(world.setup.world_size)
        total, num_used = torch.zeros_like(gradient), 0
        while world.clock.now_s < world.duration_s:
            rank = dist.recv(gradient)
            verdict = self.rule.pushed(pushes, rank)
            pushes = verdict.pushes
            if verdict.uses:
                total += gradient * self.rule.weight(world.setup.world_size)
                num_used += 1
            if verdict.updates:
                set_gradient(model, total)
                optimizer.step()
                world.updated(model, num_used * size)
                total, num_used = torch.zeros_like(gradient), 0
            for each in verdict.answers:
                dist.send(torch.cat([flat(model), torch.zeros(1)]), each)
        stop = torch.cat([flat(model), torch.ones(1)])
        left = world.setup.world_size
        for each in pushes.waiting:
            dist.send(stop, each)
            left -= 1
        for _ in range(left):
            dist.send(stop, dist.recv(gradient))
