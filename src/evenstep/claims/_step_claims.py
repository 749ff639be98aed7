"""The claims of one step, as the rank that grants them keeps them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .._types import FloatArray, IntArray, sizes_of
from ..exceptions import invalid
from ._schemes import BoolArray, Hybrid


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


@dataclass(frozen=True, slots=True, eq=False)
class StepClaims:
    """What is left of a step that runs under ``Hybrid``, and whose samples a claim gets.

    How many samples a claim gets is the scheme's to say. Which ones: a rank's own as long as there
    are any, from the front, as they were fetched for it; then those of the rank that has most
    left, from the end. So samples change hands only where the prediction was wrong.

    Every claim but the last of a part is a whole number of ``tile`` samples.

    Attributes:
        scheme: says how large first chunks and claims are.
        batch_size: the plan, ``(world_size,)``.
        tile: samples that keep together, at least 1.
        front: first tile of each rank's part that is not claimed, ``(world_size,)``.
        back: the tile after the last of those, ``(world_size,)``.
        left: ranks that leave the rest to others, ``(world_size,)``.
        speeds: samples per second that each rank has reported, NaN before, ``(world_size,)``.
    """

    scheme: Hybrid
    batch_size: IntArray
    tile: int
    front: IntArray
    back: IntArray
    left: BoolArray
    speeds: FloatArray

    @classmethod
    def begin(cls, scheme: Hybrid, batch_size: IntArray, *, tile: int = 1) -> StepClaims:
        """Return a step of which every rank has its first chunk.

        Args:
            scheme: says how large first chunks and claims are.
            batch_size: the plan, ``(world_size,)``, not all 0.
            tile: samples that keep together, as in forwards of one fixed shape.

        Raises:
            ValueError: ``tile`` is below 1, or the plan is no plan.
        """
        if tile < 1:
            raise invalid("StepClaims.begin(tile=...)", "be at least 1", tile, "Use 1.")
        sizes = sizes_of("StepClaims.begin(batch_size=...)", batch_size)
        tiles = -(-sizes // tile)
        return cls(
            scheme=scheme,
            batch_size=sizes,
            tile=tile,
            front=scheme.first_chunk(tiles),
            back=tiles,
            left=tiles == 0,
            speeds=np.full(len(tiles), np.nan),
        )

    @property
    def first(self) -> IntArray:
        """Samples that every rank begins with, unasked, ``(world_size,)``."""
        chunk = self.scheme.first_chunk(-(-self.batch_size // self.tile)) * self.tile
        first: IntArray = np.minimum(chunk, self.batch_size)
        return first

    def claim(self, rank: int, speed: float | None = None) -> tuple[tuple[Claim, ...], StepClaims]:
        """Return what ``rank`` gets next, nothing if it is done, and what holds from now on.

        Claims go by the speeds in this very step. If a rank has reported none, the plan stands:
        who was given twice as much is taken for twice as fast.

        Args:
            rank: who claims.
            speed: samples per second of its newest samples, positive; None if it has none.
        """
        speeds = self.speeds
        if speed is not None:
            speeds = speeds.copy()
            speeds[rank] = speed
        known, planned = ~np.isnan(speeds), self.batch_size.astype(np.float64)
        per_planned = (
            float(np.mean(speeds[known] / np.maximum(planned[known], 1))) if any(known) else 1.0
        )
        speeds_now = np.where(known, speeds, per_planned * planned)
        remaining = int((self.back - self.front).sum())
        total = int(-(-self.batch_size // self.tile).sum())
        size = self.scheme.claim_size(remaining, total, self.left, speeds_now, rank)
        after = replace(self, speeds=speeds)
        if remaining and not size:
            return (), after._leaving(rank)
        return after._give(rank, size)

    def claim_own(self, rank: int) -> tuple[tuple[Claim, ...], StepClaims]:
        """Return all that is left of the rank's own part: for a loop that has to know it whole.

        It gets no more after that, so the others do not leave anything to it; and if all of them
        have left theirs already, it gets that too.
        """
        after = self._leaving(rank)
        tiles = self.back - self.front
        return after._give(rank, int(tiles.sum() if after.left.all() else tiles[rank]))

    def _leaving(self, rank: int) -> StepClaims:
        """Return the step after ``rank`` has said that it claims no more."""
        left = self.left.copy()
        left[rank] = True
        return replace(self, left=left)

    def _give(self, rank: int, num_tiles: int) -> tuple[tuple[Claim, ...], StepClaims]:
        """Hand ``num_tiles`` tiles over, which there are."""
        if not num_tiles:
            return (), self
        front, back, pieces = self.front.copy(), self.back.copy(), []
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
        return tuple(pieces), replace(self, front=front, back=back)

    def _piece(self, owner: int, start: int, stop: int) -> Claim:
        size = int(self.batch_size[owner])
        return Claim(owner, start * self.tile, min(stop * self.tile, size))
