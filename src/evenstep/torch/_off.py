"""``EVENSTEP=off``: what models and loaders get in the place of a run, equal parts of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import numpy as np
import torch
from torch import nn

from .._diagnosis import Phase
from .._planner import Plan
from .._types import IntArray
from ..claims._step_claims import Claim
from ._data._prepare import agreed_batch_size, balanced_loader, check_is_loader
from ._data._protocols import MicroBatch, StepStart
from ._data.deal._stream_deal import StreamKind
from ._data.loaders._base import StepContext
from ._fabric import as_wrapped, still_wrapped, wrapped_loader, wrapped_model
from ._model._models import with_ddp
from ._prepared_run import PreparedRun


@final
class PlainRun:
    """Prepares models and loaders, and is the session, the steps and the ranks of the loaders.

    Step $k$ has the samples that it has in a balanced run. What ranks send each other goes by
    collectives. A batch counts as trained on when it was handed out.

    Args:
        parts: that were joined.

    Attributes:
        modules: that were prepared, as they came back.
        step: that is under way; None outside of a loop.
        plan: equal sizes, from the first step on.
        plan_in_use: none, so that an evaluation is shared out equally.
    """

    plan_in_use = None

    def __init__(self, parts: PreparedRun) -> None:
        crew = parts.join()
        self.rank, self.world_size = crew.side.rank, crew.side.world_size
        self.modules: list[nn.Module] = []
        self.step: StepStart | None = None
        self.plan: Plan | None = None
        self._parts, self._crew = parts, crew
        self._equal: Plan | None = None

    def add_model(self, given: nn.Module) -> nn.Module:
        """Return a model in a DDP if it averages in no way."""
        outer = with_ddp(wrapped_model(given), self.world_size, self._crew.workers)
        self.modules.append(outer)
        return still_wrapped(given, outer)

    def add_loader(self, given: Any, stream: StreamKind | None) -> Any:
        """Return a loader of this rank's equal part of each step."""
        parts, loader = self._parts, wrapped_loader(given)
        check_is_loader(loader)
        size = agreed_batch_size(parts.global_batch_size, loader, self.world_size)
        parts.global_batch_size = size
        context = StepContext(self, self, size, count=parts.count, counter=parts.counter)
        prepared = balanced_loader(loader, stream, context, beside=parts.loaders)
        prepared.attempts = PlainAttempts()
        parts.loaders.append(prepared)
        tail = prepared.tail_batch_size
        self._equal = Plan(0, 0, self._shares(size), tail=self._shares(tail) if tail else None)
        return as_wrapped(given, prepared)

    @property
    def num_units(self) -> float | None:
        """Units of this rank in the step under way, samples or others; None outside of one."""
        if (step := self.step) is None:
            return None
        return step.num_samples if step.units is None else step.units

    @property
    def steps(self) -> PlainRun:
        """The steps of the run."""
        return self

    @property
    def next_unused(self) -> int:
        """The step after the newest one."""
        return self._parts.count.value

    def begin_epoch(self, *, cuts: bool) -> None:
        """Do nothing."""

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Do nothing: there is no later plan."""

    def at(self, step: int) -> Plan:
        """Return equal sizes."""
        assert self._equal is not None, "`prepare` comes first"
        self.plan = self._equal
        return self._equal

    def begin_step(self, start: StepStart) -> None:
        """Take note of this rank's samples and units."""
        self.step = start

    def begin_forward(self, step: int, part: MicroBatch, *, is_last: bool) -> None:
        """Do nothing."""

    def came_to_end(self) -> None:
        """Do nothing."""

    def end_epoch(self) -> None:
        """Take note that no step is under way."""
        self.step = None

    def report_now(self) -> None:
        """Do nothing."""

    def timed(self, phase: Phase) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def claim(
        self, step: int, *, speed: float | None = None, own: bool = False
    ) -> tuple[Claim, ...]:
        """Return nothing: no samples are up for claims."""
        return ()

    def begin_claim(self) -> None:
        """Do nothing."""

    def end_claim(self, step: int, num_samples: int) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing: torch notices a lost rank in the next collective."""

    def share(self, key: tuple[int, int], ints: IntArray | None) -> IntArray:
        """Return on every rank the integers that rank 0 calls it with. Collective."""
        listed = None if ints is None else ints.tolist()
        return np.array(self._crew.side.share_indices(listed), np.int64)

    def gather(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        """Return what returns the numbers of all ranks. Collective."""
        rows = self._crew.side.collect(numbers)
        return lambda: rows

    def _shares(self, num_samples: int) -> tuple[int, ...]:
        each, left = divmod(num_samples, self.world_size)
        return tuple(each + (rank < left) for rank in range(self.world_size))


class PlainAttempts:
    """Runs each forward and backward of a step once."""

    probes = False

    def run(
        self,
        step: int,
        parts: Sequence[MicroBatch],
        closure: Callable[[Any], torch.Tensor],
        through: Callable[[torch.Tensor], Any],
    ) -> torch.Tensor:
        """Return the loss of the only part, detached."""
        loss = closure(parts[0].batch)
        through(loss)
        return loss.detach()
