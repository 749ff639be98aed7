"""A predicted first chunk, and claims on the rest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, final

import numpy as np

from .._types import FloatArray, IntArray
from .._valid import check_fields
from ._base import AbstractScheme, BoolArray, Chunk, Planned, Turn
from ._factoring import Factoring


@dataclass(frozen=True, slots=True, eq=False)
class HybridState:
    """A step under way.

    Attributes:
        first: the first chunks, and who has begun with theirs. The rest of the slots lie behind.
        next_slot: the first slot that is not claimed: the shared counter of a driver.
        num_slots: samples of the step.
        left: ranks that leave the rest to others, ``(world_size,)``.
    """

    first: Planned
    next_slot: int
    num_slots: int
    left: BoolArray


@final
@dataclass(frozen=True, slots=True)
class Hybrid(AbstractScheme[HybridState]):
    r"""Each rank begins with a part of its predicted share, then all claim what is left.

    Of its planned $b_i$ samples a rank computes $\max(1, \lfloor p \, b_i \rfloor)$ at once. The
    other samples of all ranks are pooled, and ranks that are ready claim from the pool by
    ``factoring``. If the prediction was right, this costs some claims. If it was wrong by up to a
    factor of about $1 / p$, the step makes up for it.

    The defaults were chosen for claims that cost a hundredth of the step.

    Right if load changes faster than a plan can follow, and claims are cheap compared with that.
    Wrong on steady workers: each claim is one more forward and one more request, for nothing. The
    samples of the step, and so its gradient, are the same either way.

    Args:
        first: $p$, the part of the plan that cannot be claimed, in [0, 1]. 1 is ``Bsp``.
        factoring: how large a claim is.
        least: smallest claim, as a share of the rank's part of the whole step, in [0, 1]. Smaller
            claims are mostly cost, and after larger ones ranks end too far apart.
        claim_s: seconds that a claim takes on its rank, at least 0: the request, and the fixed cost
            of a forward.

    Raises:
        ValueError: an argument is out of range.

    References:
        As for ``Factoring``. Prediction and claims together are evenstep's own.
    """

    moves_samples: ClassVar[bool] = True

    first: float = 0.4
    factoring: Factoring = field(default_factory=lambda: Factoring(0.9))
    claim_s: float = 0.0
    least: float = 0.05

    def __post_init__(self) -> None:
        check_fields(
            self,
            first=("in [0, 1]", "0.4 makes up for a rank at 0.4 times its speed."),
            claim_s=("finite and at least 0", "Measure what one takes."),
            least=("in [0, 1]", "0.05 is a twentieth."),
        )

    def local_steps(self, step_s: FloatArray) -> IntArray:
        return np.ones(len(step_s), np.int64)

    def first_chunk(self, batch_size: IntArray) -> IntArray:
        """Return how many samples every rank begins with, both ``(world_size,)``.

        At least 1 wherever something was planned, so that every rank is measured in every step.
        """
        part = np.floor(self.first * batch_size).astype(np.int64)
        chunk: IntArray = np.minimum(np.maximum(part, 1), batch_size)
        return chunk

    def begin(self, batch_size: IntArray) -> HybridState:
        num_slots = int(Planned.of(batch_size).edges[-1])
        first = Planned.of(self.first_chunk(np.asarray(batch_size)))
        return HybridState(first, int(first.edges[-1]), num_slots, np.zeros_like(first.begun))

    def turn(self, state: HybridState, rank: int, speeds: FloatArray) -> Turn[HybridState]:
        chunk, first = state.first.take(rank)
        state = replace(state, first=first)
        if chunk:
            return Turn(chunk, state)
        start, remaining = state.next_slot, state.num_slots - state.next_slot
        size = self.claim_size(remaining, state.num_slots, state.left, speeds, rank)
        if size:
            claim = Chunk(start, start + size, self.claim_s, is_moved=True)
            return Turn(claim, replace(state, next_slot=claim.stop))
        left = state.left.copy()
        left[rank] |= remaining > 0
        return Turn(None, replace(state, left=left))

    def claim_size(
        self, remaining: int, total: int, left: BoolArray, speeds: FloatArray, rank: int
    ) -> int:
        """Return how many samples ``rank`` claims now; 0 if it leaves the rest to others.

        Args:
            remaining: samples that are not claimed.
            total: samples of the step.
            left: ranks that leave the rest to others, ``(world_size,)``.
            speeds: samples per second, positive, likewise.
            rank: who claims.
        """
        if not remaining or left[rank]:
            return 0
        going = np.where(left, 0.0, speeds)
        size = self.factoring.next_claim(remaining, going, rank)
        least = int(self.least * total * speeds[rank] / going.sum())
        return min(remaining, max(size, least)) if size else 0
