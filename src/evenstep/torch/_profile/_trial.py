"""One worker's own seconds and peaks at one size after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..._private_torch import version_of
from ...exceptions import invalid
from ...timemodels import Profile
from .._memory._kept import kept
from .._memory._oom import attempt, free_memory
from .._memory._probe import Closure
from .._memory_reader import MemoryReader
from .._parts import Parts
from .._step._clock import AbstractClock


@dataclass(frozen=True, slots=True)
class Request:
    """What ``Balancer.profile`` was asked for; its arguments are explained there."""

    closure: Closure
    sizes: Sequence[int] | None
    repeats: int
    samples: Sequence[Any] | None
    through: Callable[[torch.Tensor], Any]
    path: str | Path | None

    def __post_init__(self) -> None:
        if not callable(self.closure):
            rule, remedy = "be callable", "Give a function from a batch to its loss."
            raise invalid("Balancer.profile(closure=...)", rule, repr(self.closure)[:60], remedy)
        if type(self.repeats) is not int or self.repeats < 1:
            remedy = "With 3, one disturbed run does not count."
            raise invalid("Balancer.profile(repeats=...)", "be at least 1", self.repeats, remedy)
        if self.samples is not None and not len(self.samples):
            remedy = "Give samples of the data set, before they are collated."
            raise invalid("Balancer.profile(samples=...)", "hold a sample", "none", remedy)


@dataclass(slots=True)
class Measured:
    """What a worker found, measurement by measurement.

    Attributes:
        capacity_bytes: memory that it can use, 0 where that is unknown.
        sizes: samples of each measurement, ascending.
        seconds: what it took.
        peak_bytes: the memory peak, 0 where that is unknown.
        out_of_memory: the size that did not fit; 0 if all did.
    """

    capacity_bytes: int
    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    out_of_memory: int = 0

    def profile(self) -> Profile:
        """Return the measurements.

        Raises:
            RuntimeError: there are fewer than two sizes, which say nothing of a curve.
        """
        sizes = sorted(set(self.sizes))
        if len(sizes) < 2:
            raise RuntimeError(
                f"Memory ran out at {self.out_of_memory} samples, so that only {sizes} of at least "
                f"two sizes could be measured. Give `Balancer.profile(sizes=...)` smaller ones, "
                f"use a smaller model, or leave this worker out."
            )
        return Profile(self.sizes, self.seconds, self.peak_bytes if any(self.peak_bytes) else None)


@dataclass(frozen=True, slots=True)
class Trial:
    """Runs forward and backward at any size, on this rank alone and without a trace.

    Attributes:
        asked: the user's closure, and how often it runs.
        parts: the models, whose gradients, buffers and synchronisation are put back.
        make: makes a batch of so many samples.
        forward_size: samples of every forward, where their number varies; None is all in one.
        clock: sets the marks.
        memory: reads the peaks.
    """

    asked: Request
    parts: Parts
    make: Callable[[int], Any]
    forward_size: int | None
    clock: AbstractClock
    memory: MemoryReader

    def measure(self, sizes: Sequence[int]) -> Measured:
        """Return what each size takes, up to the first that does not fit.

        A run ahead of those that count warms up each size: memory pools, kernels, compilation.
        Runs in which something is compiled still are left out, and the sizes end where another
        one might leave a model uncompiled.

        Args:
            sizes: ascending.

        Raises:
            RuntimeError: the closure changes parameters.
        """
        found = Measured(self.memory.capacity_bytes())
        models, watch = self.parts.models, self.parts.watch
        with models.apart(), kept(models.modules()), torch.enable_grad():
            for size in sizes:
                if not self._fits(size, found):
                    found.out_of_memory = size
                    break
                if watch.holds and len(set(found.sizes)) > 1:
                    break
        free_memory()
        return found

    def _fits(self, size: int, found: Measured) -> bool:
        """Add the measurements at ``size``; return whether memory sufficed."""
        try:
            failed = attempt(lambda: self._measure(size, found))
        finally:
            self.parts.watch.end_step(0)
        if failed is not None:
            self._clear()
            free_memory()
        return failed is None

    def _measure(self, size: int, found: Measured) -> None:
        part = self.forward_size or size
        batch, times = self.make(part), size // part
        before = self._versions()
        self._run(batch, part, times)
        if self._versions() != before:
            raise RuntimeError(
                "A forward and backward of `Balancer.profile(closure)` changed parameters. Give it "
                "a closure that returns the loss of a batch and does nothing else, and register "
                "hooks that step an optimizer in the backward after it."
            )
        self.memory.reset()
        runs = [self._run(batch, part, times) for _ in range(self.asked.repeats)]
        clean = [seconds for seconds, stalled in runs if not stalled]
        seconds = clean or [seconds for seconds, _ in runs]
        found.sizes += [size] * len(seconds)
        found.seconds += seconds
        found.peak_bytes += [self.memory.peak_bytes()] * len(seconds)

    def _run(self, batch: Any, num_samples: int, times: int) -> tuple[float, bool]:
        """Return the seconds of one step of ``times`` forwards, and whether it is no measure."""
        watch = self.parts.watch
        self._clear()
        watch.begin_step(0)
        begin = self.clock.mark()
        for _ in range(times):
            watch.num_samples = num_samples
            if watch.on_cuda:
                watch.tunes(num_samples, is_last=True)
            loss = self.asked.closure(batch)
            watch.num_samples = 0
            self.asked.through(loss)
        end = self.clock.mark()
        self.clock.wait(end)
        seconds = self.clock.seconds(begin, end)
        return max(seconds or 0.0, 1e-9), watch.stalled  # a clock may not resolve it

    def _clear(self) -> None:
        for parameter in self.parts.models.parameters():
            parameter.grad = None

    def _versions(self) -> list[int]:
        return [version_of(parameter) for parameter in self.parts.models.parameters()]
