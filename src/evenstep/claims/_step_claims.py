"""The claims of one step, as the rank that grants them keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import IntArray, check_range, sizes_of
from ._schemes import Hybrid


@dataclass(frozen=True, slots=True)
class Claim:
    """Consecutive samples of one rank's planned part of a step.

    Attributes:
        owner: the rank in whose plan they were.
        start: the first of them, counted from the first of that rank's part.
        stop: the one after the last.
    """

    owner: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """Samples in it, at least 1."""
        return self.stop - self.start


@final
class StepClaims:
    """What is left of a step that runs under ``Hybrid``, and whose samples a claim gets.

    How many samples a claim gets is the scheme's to say. Which ones: a rank's own as long as there
    are any, from the front, as they were fetched for it; then those of the rank that has most
    left, from the end. So samples change hands only where the prediction was wrong.

    Every claim but the last of a part is a whole number of ``tile`` samples.

    Args:
        scheme: says how large first chunks and claims are.
        batch_size: the plan, ``(world_size,)``, not all 0.
        tile: samples that keep together, as in forwards of one fixed shape.

    Attributes:
        first: samples that every rank begins with, unasked, ``(world_size,)``.

    Raises:
        ValueError: ``tile`` is below 1, or the plan is no plan.
    """

    def __init__(self, scheme: Hybrid, batch_size: IntArray, *, tile: int = 1) -> None:
        check_range("StepClaims(tile=...)", tile, "at least 1", "Use 1.")
        self._scheme, self._tile = scheme, tile
        self._sizes = sizes_of("StepClaims(batch_size=...)", batch_size)
        # In tiles: the first of each rank's part that is not claimed, and the one after the last.
        self._back = -(-self._sizes // tile)
        self._front = scheme.first_chunk(self._back)
        self._total = int(self._back.sum())
        self._left = self._back == 0  # ranks that leave the rest to others
        self._speeds = np.full(len(self._sizes), np.nan)  # as reported, in samples per second
        self.first: IntArray = np.minimum(self._front * tile, self._sizes)

    def claim(self, rank: int, speed: float | None = None) -> tuple[Claim, ...]:
        """Return what ``rank`` gets next; nothing if it is done.

        Claims go by the speeds in this very step. If a rank has reported none, the plan stands:
        who was given twice as much is taken for twice as fast.

        Args:
            rank: who claims.
            speed: samples per second of its newest samples, positive; None if it has none.
        """
        speeds = self._speeds
        if speed is not None:
            speeds[rank] = speed
        known, planned = ~np.isnan(speeds), self._sizes.astype(np.float64)
        per_planned = 1.0
        if any(known):
            per_planned = float(np.mean(speeds[known] / np.maximum(planned[known], 1)))
        speeds_now = np.where(known, speeds, per_planned * planned)
        remaining = int((self._back - self._front).sum())
        size = self._scheme.claim_size(remaining, self._total, self._left, speeds_now, rank)
        if remaining and not size:
            self._left[rank] = True
        return self._give(rank, size)

    def claim_own(self, rank: int) -> tuple[Claim, ...]:
        """Return all that is left of the rank's own part: for a loop that has to know it whole.

        It gets no more after that, so the others do not leave anything to it; and if all of them
        have left theirs already, it gets that too.
        """
        self._left[rank] = True
        tiles = self._back - self._front
        return self._give(rank, int(tiles.sum() if self._left.all() else tiles[rank]))

    def _give(self, rank: int, num_tiles: int) -> tuple[Claim, ...]:
        """Hand ``num_tiles`` tiles over, which there are."""
        front, back, pieces = self._front, self._back, []
        own = min(num_tiles, int(back[rank] - front[rank]))
        if own:
            pieces.append(self._piece(rank, int(front[rank]), int(front[rank]) + own))
            front[rank] += own
        rest = num_tiles - own
        while rest:
            owner = int(np.argmax(back - front))
            taken = min(rest, int(back[owner] - front[owner]))
            pieces.append(self._piece(owner, int(back[owner]) - taken, int(back[owner])))
            back[owner] -= taken
            rest -= taken
        return tuple(pieces)

    def _piece(self, owner: int, start: int, stop: int) -> Claim:
        size = int(self._sizes[owner])
        return Claim(owner, start * self._tile, min(stop * self._tile, size))
