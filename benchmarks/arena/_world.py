"""What a contestant finds on its rank: data, a device, a clock, a log."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.arena._devices import Clock, Device, OnDevice
from benchmarks.arena._setups import ArenaSetUp
from benchmarks.arena._tasks import Order, digits, network

SNAPSHOT_S = 0.2
"""Between two copies of the parameters, whose accuracy is found after the race."""


@dataclass(slots=True)
class Log:
    """What one rank saw of a contestant.

    Attributes:
        updates: for each update of the model, the clock and the samples so far.
        snapshots: the clock, and the parameters then.
    """

    updates: list[tuple[float, int]] = field(default_factory=list)
    snapshots: list[tuple[float, torch.Tensor]] = field(default_factory=list)


class World:
    """One rank of one contestant.

    Args:
        setup: the machines and the task.
        rank: this worker; one past the last is a server.
        seed: of the order of samples and of the first parameters.
        duration_s: how long a contestant that cannot pause trains.
        snapshot_s: least seconds between two copies of the parameters.
    """

    def __init__(
        self,
        setup: ArenaSetUp,
        rank: int,
        *,
        seed: int,
        duration_s: float,
        snapshot_s: float = SNAPSHOT_S,
    ) -> None:
        self.setup, self.rank, self.seed, self.duration_s = setup, rank, seed, duration_s
        self._snapshot_s = snapshot_s
        best_s = setup.step_s(setup.best(np.ones(setup.world_size)))
        self.max_steps = 10 + int(2 * duration_s / best_s)
        self.clock, self.log = Clock(), Log()
        self.device = Device(setup, min(rank, setup.world_size - 1), self.clock)
        self.order = Order(seed, self.max_steps * setup.global_batch_size)

    def network(self) -> nn.Sequential:
        """Return the network with the parameters that every contestant begins with."""
        return network(self.seed)

    def model(self) -> OnDevice:
        """Return the network on this rank's device."""
        return OnDevice(self.network(), self.device, self.clock)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return plain SGD, as LBB's."""
        return torch.optim.SGD(model.parameters(), lr=self.setup.learning_rate)

    def loss(self, model: nn.Module, first: int, num_samples: int) -> torch.Tensor:
        """Return the mean loss over so many samples from position ``first`` of the order."""
        wanted = self.order.indices[first : first + num_samples]
        train = digits()[0]
        return cross_entropy(model(train.x[wanted]), train.y[wanted])

    def updated(self, model: nn.Module, num_samples: int) -> None:
        """Note that the model has learnt from ``num_samples`` more; only one rank's log is read."""
        now_s, log = self.clock.now_s, self.log
        before = log.updates[-1][1] if log.updates else 0
        log.updates.append((now_s, before + num_samples))
        if not log.snapshots or now_s - log.snapshots[-1][0] >= self._snapshot_s:
            log.snapshots.append((now_s, flat(model)))


def flat(model: nn.Module) -> torch.Tensor:
    """Return a copy of all parameters in one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def flat_gradient(model: nn.Module) -> torch.Tensor:
    """Return a copy of all gradients in one vector; zeros where there are none."""
    parts = [
        torch.zeros_like(each).flatten() if each.grad is None else each.grad.flatten()
        for each in model.parameters()
    ]
    return torch.cat(parts)


def set_gradient(model: nn.Module, gradient: torch.Tensor) -> None:
    """Give the parameters their parts of a flat gradient."""
    parts = gradient.split([each.numel() for each in model.parameters()])
    for each, part in zip(model.parameters(), parts, strict=True):
        each.grad = part.view_as(each)


def set_parameters(model: nn.Module, parameters: torch.Tensor) -> None:
    """Copy a flat vector into the parameters."""
    with torch.no_grad():
        parts = parameters.split([each.numel() for each in model.parameters()])
        for each, part in zip(model.parameters(), parts, strict=True):
            each.copy_(part.view_as(each))


def all_ranks(value: float) -> list[float]:
    """Return every rank's value, by rank."""
    mine = torch.tensor([value], dtype=torch.float64)
    each = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(each, mine)
    return [float(one) for one in each]
