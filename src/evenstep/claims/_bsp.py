"""Every rank computes what was planned, and all wait for the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from .._types import FloatArray, IntArray
from ._base import AbstractScheme, Planned, Turn


@final
@dataclass(frozen=True, slots=True)
class Bsp(AbstractScheme[Planned]):
    """Bulk synchronous steps: as planned, a barrier, one gradient.

    What DDP does, and the reference for every other scheme. Right where the plan is. Wrong where
    speeds change faster than plans follow: a rank that turns slow inside a step holds up all.

    References:
        L. Valiant, *A bridging model for parallel computation*, CACM 1990.
    """

    moves_samples: ClassVar[bool] = False

    def local_steps(self, step_s: FloatArray) -> IntArray:
        return np.ones(len(step_s), np.int64)

    def begin(self, batch_size: IntArray) -> Planned:
        return Planned.of(batch_size)

    def turn(self, state: Planned, rank: int, speeds: FloatArray) -> Turn[Planned]:
        chunk, after = state.take(rank)
        return Turn(chunk, after)
