"""Emulated devices: real arithmetic, and sleep until the device would be done."""

from __future__ import annotations

from functools import partial
from time import perf_counter, sleep

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from benchmarks._sleepers import Due
from benchmarks.arena._setups import ArenaSetUp

MEMORY_BYTES = 16 << 30
"""Of an emulated machine; a job that takes all of its CPU would take half of it."""


class Clock:
    """Seconds of a contestant's training; it stands still while others have their turn."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._since_s: float | None = None

    @property
    def now_s(self) -> float:
        """Seconds so far."""
        running_s = 0.0 if self._since_s is None else perf_counter() - self._since_s
        return self._spent_s + running_s

    def start(self) -> None:
        """Go on."""
        self._since_s = perf_counter()

    def wait_until(self, end_s: float) -> None:
        """Return when the clock is there."""
        sleep(max(0.0, end_s - self.now_s))

    def stop(self) -> None:
        """Stand still."""
        self._spent_s, self._since_s = self.now_s, None


class Device:
    """One worker's device.

    ``late_s`` has what a busy machine adds to each sleep.

    Args:
        setup: whose curves and trace it follows.
        rank: the worker.
        clock: of the contestant.
    """

    def __init__(self, setup: ArenaSetUp, rank: int, clock: Clock) -> None:
        self._setup, self._rank, self._clock = setup, rank, clock
        self._share = 1.0
        self.slept_s = 0.0
        self.late_s: list[float] = []

    def compute(self, num_samples: int, began_s: float, *, after: int = 0) -> None:
        """Sleep until the device is done with what it began at ``began_s`` of the clock.

        Args:
            num_samples: how many samples.
            began_s: when it began them.
            after: samples of the same step that it has done: these have paid its fixed cost.
        """
        alone_s = self._alone_s(after + num_samples) - self._alone_s(after)
        end_s = self._setup.trace.end_s(self._rank, began_s, alone_s)
        if alone_s:
            self._share = min(1.0, alone_s / (end_s - began_s))
        self._until(end_s)
        self.late_s.append(self._clock.now_s - end_s)

    def read(self) -> tuple[float, int]:
        """Return the share of its CPU that the worker can have, and free bytes.

        Other jobs take the rest, and memory with it.
        """
        if self._setup.tells_quota:
            self._share = 1 / float(self._setup.trace.at(self._clock.now_s)[self._rank])
        return self._share, int(MEMORY_BYTES * (1 + self._share) / 2)

    def exchange(self) -> None:
        """Take the time of one exchange."""
        self._until(self._clock.now_s + self._setup.exchange_s)

    def _alone_s(self, num_samples: int) -> float:
        sizes = np.full(self._setup.world_size, num_samples)
        return float(self._setup.times.seconds(sizes)[self._rank])

    def _until(self, end_s: float) -> None:
        before_s = self._clock.now_s
        self._clock.wait_until(end_s)
        self.slept_s += self._clock.now_s - before_s


class OnDevice(nn.Module):
    """A network whose backward ends when the device is done.

    The real arithmetic is part of the device's time. The gradient of the first weight, the last
    to be known, waits for the device: until then DDP cannot reduce it.

    Args:
        network: what is computed; it begins with a convolution.
        device: how long it takes.
        clock: of the contestant.
    """

    def __init__(self, network: nn.Sequential, device: Device, clock: Clock) -> None:
        super().__init__()
        self.network = network
        self._device, self._clock = device, clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output; its backward takes the time of both."""
        first, *rest = self.network
        ready = partial(self._device.compute, len(x), self._clock.now_s)
        y: torch.Tensor = functional_call(first, {"weight": Due.apply(first.weight, ready)}, x)
        for layer in rest:
            y = layer(y)
        return y
