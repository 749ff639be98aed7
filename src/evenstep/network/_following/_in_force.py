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
    """

    epoch: int
    first_step: int
    parts: tuple[int, ...] | None
    predicted_s: float | None
    reason: str

    @property
    def shares(self) -> FloatArray | None:
        """The parts as shares that add up to 1, ``(world_size,)``; None for plain all-reduce."""
        return None if self.parts is None else np.array(self.parts) / sum(self.parts)


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
