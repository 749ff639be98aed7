"""Shares as the integers that all ranks apply in the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from ..._types import FloatArray
from ...events import Event


@final
@dataclass(frozen=True, slots=True)
class SharesInForce:
    """Who sums which part of the gradients from one step on, until a later plan replaces it.

    Attributes:
        epoch: number of the plan, from 0. It grows by one whenever the parts change, so ranks that
            name the same epoch hold the same integers.
        first_step: first optimizer step that uses it, counted over the whole run, from 0.
        parts: part of every bucket that each rank sums, as ``Split`` has them; None for
            plain all-reduce.
        predicted_s: what an exchange takes by the model, as the links were known; None before.
        reason: why, in words.
        num_exchanges: how many exchanges use the parts, at least 1; after them, plain all-reduce
            does until a later plan. None is no limit. A probe's result takes some steps to become a
            plan, and these are not to wait for slow shares.
    """

    epoch: int
    first_step: int
    parts: tuple[int, ...] | None
    predicted_s: float | None
    reason: str
    num_exchanges: int | None = None

    @property
    def shares(self) -> FloatArray | None:
        """The parts as shares that add up to 1, ``(world_size,)``; None for plain all-reduce."""
        return None if self.parts is None else np.array(self.parts) / sum(self.parts)

    def is_shared(self, num_before: int) -> bool:
        """Return whether an exchange uses the parts, after ``num_before`` under this plan."""
        is_over = self.num_exchanges is not None and num_before >= self.num_exchanges
        return self.parts is not None and not is_over


@final
@dataclass(frozen=True, slots=True)
class ShareOutcome:
    """What followed from one exchange.

    Attributes:
        plan: what holds from now on; the very same object if nothing changed.
        events: the facts, in order.
    """

    plan: SharesInForce
    events: tuple[Event, ...]
