"""One worker's own seconds and peaks at one size after another."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...timemodels import Profile
from .._clock import AbstractClock
from .._memory._kept import kept
from .._memory._lack import free_memory, is_out_of_memory
from .._memory._memory import MemoryReader
from .._memory._probe import Closure
from .._model._compile_watch import CompileWatch
from .._model._prepared import PreparedModels


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
        closure: from a batch to its loss.
        through: runs the backward of a loss.
        make: makes a batch of so many samples.
        forward_size: samples of every forward, where their number varies; None is all in one.
        models: whose gradients, buffers and synchronisation are put back.
        watch: notices what is compiled.
        clock: sets the marks.
        memory: reads the peaks.
    """

    closure: Closure
    through: Callable[[torch.Tensor], Any]
    make: Callable[[int], Any]
    forward_size: int | None
    models: PreparedModels
    watch: CompileWatch
    clock: AbstractClock
    memory: MemoryReader

    def measure(self, sizes: Sequence[int], *, repeats: int) -> Measured:
        """Return what each size takes, up to the first that does not fit.

        A run ahead of those that count warms up each size: memory pools, kernels, compilation.
        Runs in which something is compiled still are left out, and the sizes end where another
        one might leave a model uncompiled.

        Args:
            sizes: ascending.
            repeats: runs of each size that count.

        Raises:
            RuntimeError: the closure changes parameters.
        """
        found = Measured(self.memory.capacity_bytes())
        with self.models.apart(), kept(self.models.modules()), torch.enable_grad():
            for size in sizes:
                if not self._fits(size, repeats, found):
                    found.out_of_memory = size
                    break
                if self.watch.holds and len(set(found.sizes)) > 1:
                    break
        free_memory()
        return found

    def _fits(self, size: int, repeats: int, found: Measured) -> bool:
        """Add the measurements at ``size``; return whether memory sufficed."""
        try:
            seconds, peak = self._runs(size, repeats)
        except (RuntimeError, MemoryError) as error:
            if not (isinstance(error, MemoryError) or is_out_of_memory(error)):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold what filled the memory
            self._clear()
            free_memory()
            return False
        finally:
            self.watch.end_step()
        found.sizes += [size] * len(seconds)
        found.seconds += seconds
        found.peak_bytes += [peak] * len(seconds)
        return True

    def _runs(self, size: int, repeats: int) -> tuple[list[float], int]:
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
        runs = [self._run(batch, part, times) for _ in range(repeats)]
        clean = [seconds for seconds, stalled in runs if not stalled]
        return clean or [seconds for seconds, _ in runs], self.memory.peak_bytes()

    def _run(self, batch: Any, num_samples: int, times: int) -> tuple[float, bool]:
        """Return the seconds of one step of ``times`` forwards, and whether it is no measure."""
        self._clear()
        self.watch.begin_step()
        begin = self.clock.mark()
        for _ in range(times):
            self.watch.begin_forward(num_samples)
            self.through(self.closure(batch))
        end = self.clock.mark()
        self.clock.wait(end)
        seconds = self.clock.seconds(begin, end)
        return max(seconds or 0.0, 1e-9), self.watch.stalled  # a clock may not resolve it

    def _clear(self) -> None:
        for parameter in self.models.parameters():
            parameter.grad = None

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.models.parameters()]
