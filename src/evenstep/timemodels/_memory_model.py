"""Memory peaks of the sizes visited, turned into caps on the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import FloatArray, IntArray, check_fields

# Per worker: sizes visited and their highest peaks, ascending and padded in front with zeros,
# both (world_size, SLOTS); the newest capacity in bytes, (world_size,), 0 where unknown.
MemoryState = tuple[IntArray, IntArray, IntArray]
SLOTS = 8
UNSEEN = 2**53  # past any batch size, and still a whole number as a float


@final
@dataclass(frozen=True, slots=True)
class MemoryModel:
    r"""The largest batch that every worker's memory should hold, from peaks already seen.

    A least-squares line $m_0 + m_1 b$, $m_0, m_1 \ge 0$, through the peaks of the sizes visited is
    raised until none lies above it. From its value $m$ at the largest size visited, $b$, the rest
    of the planned memory is filled, with $M$ the capacity, $s$ the safety, $\nu$ the noise and
    $d$ the distance from the smallest size to the largest:

    $$\text{cap} = b + \frac{s M - m}{\min(m_1 + 2 \nu m / d, \; m / b)}$$

    With one size visited that is $b \, s M / m$: all of the peak is taken to grow with the batch.
    That is cautious, since weights and optimizer state do not. Sizes that lie close together
    hardly say more; sizes far apart give $(s M - m_0) / m_1$, the line's own answer. Either is
    held to `growth` times the largest size that fitted, so that the line is checked on the way
    up, and never falls below that size.

    Right for peaks that a training step repeats, which grow in a straight line with the batch.
    Wrong for the first time something rare happens at a large size (an evaluation inside the
    loop, a longest sequence): `safety` leaves room for that. A peak is never forgotten, so one
    that will not come again keeps the cap down.

    Args:
        safety: share of the capacity that may be planned, in (0, 1].
        growth: most that a size may grow on the largest that fitted, as a factor above 1.
        noise: relative error of a peak, at least 0. It decides how far apart two sizes must be
            for their difference to count as a slope.

    Raises:
        ValueError: an argument is out of range.
    """

    safety: float = 0.9
    growth: float = 2.0
    noise: float = 0.01

    def __post_init__(self) -> None:
        check_fields(
            self,
            safety=("in (0, 1]", "0.9 leaves a tenth of the memory for what varies."),
            growth=("finite and above 1", "2 lets a batch double once it was seen to fit."),
            noise=("finite and at least 0", "0.01 takes a peak for right to 1 %."),
        )

    def init(self, world_size: int) -> MemoryState:
        """Return the state in which nothing is known."""
        slots = np.zeros((world_size, SLOTS), np.int64)
        return slots, slots.copy(), np.zeros(world_size, np.int64)

    def update(
        self,
        state: MemoryState,
        batch_size: IntArray,
        peak_bytes: IntArray,
        capacity_bytes: IntArray,
    ) -> MemoryState:
        """Return the state with one step's peaks added.

        Args:
            state: what ``init`` or the last ``update`` returned; left as it is.
            batch_size: samples in the largest single forward, ``(world_size,)``.
            peak_bytes: highest memory in use during the step, ``(world_size,)``. Above the
                capacity it says that the size did not fit.
            capacity_bytes: what one worker may use in all, ``(world_size,)``.

            A rank with 0 in any of the three is unknown this time and keeps what it knows.
        """
        sizes, peaks, capacity = state
        known = (batch_size > 0) & (peak_bytes > 0) & (capacity_bytes > 0)
        size, peak = np.where(known, batch_size, 0), np.where(known, peak_bytes, 0)

        seen = (sizes == size[:, None]) & known[:, None]
        peaks = np.where(seen, np.maximum(peaks, peak[:, None]), peaks)
        new = known & ~seen.any(axis=1)
        if new.any():
            added = _insert(sizes[new], peaks[new], size[new], peak[new])
            sizes = sizes.copy()
            sizes[new], peaks[new] = added
        return sizes, peaks, np.where(known, capacity_bytes, capacity).astype(np.int64)

    def caps(self, state: MemoryState, default: IntArray, *, at_least: int = 0) -> IntArray:
        """Return the largest size that should fit, ``(world_size,)``, at least 1.

        Args:
            state: what ``init`` or ``update`` returned.
            default: the answer for a worker of which nothing is known, ``(world_size,)``. It
                bounds no other: a cap that was given is for the caller to apply.
            at_least: size to which any worker may grow at once, as far as the line lets it: that
                of what cannot be cut.
        """
        sizes, peaks, capacity = state
        known = sizes > 0
        fitted = np.where(known & (peaks <= capacity[:, None]), sizes, 0).max(axis=1)
        burst = np.where(known & (peaks > capacity[:, None]), sizes, UNSEEN).min(axis=1)

        least, top, at_top, span = _raised_line(sizes, peaks)
        room = self.safety * capacity - at_top
        doubt = _ratio(2 * self.noise * at_top, span, otherwise=np.inf)
        steep = np.minimum(least + doubt, _ratio(at_top, top, otherwise=0.0))
        slope = np.where(room < 0, least, steep)
        fits = top + _ratio(room, slope, otherwise=np.where(room < 0, -np.inf, np.inf))
        grown = np.maximum(self.growth * fitted, at_least)
        fits = np.where(fitted > 0, np.minimum(fits, grown), fits)
        # A hair more: 0.9 * 100 / 9 shall count as 10.
        cap = np.floor(np.clip(fits + 1e-9, 1, burst - 1)).astype(np.int64)
        return np.where(known.any(axis=1), np.maximum(np.maximum(cap, fitted), 1), default)


def _raised_line(
    sizes: IntArray, peaks: IntArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return a line above every known peak, neither its slope nor its start negative.

    Its slope; the largest size visited, and the bytes that the line has there; and how far below
    that the smallest size lies. All ``(world_size,)``.
    """
    known = sizes > 0
    count = known.sum(axis=1)
    top = sizes[:, -1].astype(np.float64)
    smallest = np.where(known, sizes, UNSEEN).min(axis=1)
    off_size = np.where(known, sizes - _ratio(sizes.sum(axis=1), count)[:, None], 0)
    off_peak = np.where(known, peaks - _ratio(peaks.sum(axis=1), count)[:, None], 0)

    # The steepest that any peak calls for on its own: a line from 0 needs no more to be above all.
    to_scale = _ratio(peaks, sizes).max(axis=1)
    slope = _ratio((off_size * off_peak).sum(axis=1), (off_size**2).sum(axis=1), otherwise=np.nan)
    slope = np.where(count > 1, np.clip(slope, 0, to_scale), to_scale)
    base = np.where(known, peaks - slope[:, None] * sizes, 0).max(axis=1)
    return slope, top, np.maximum(base, 0) + slope * top, np.maximum(top - smallest, 0)


def _ratio(
    numerator: FloatArray | IntArray,
    denominator: FloatArray | IntArray,
    *,
    otherwise: float | FloatArray = 0.0,
) -> FloatArray:
    """Divide, with ``otherwise`` where the denominator is 0."""
    answer = np.broadcast_to(np.asarray(otherwise, np.float64), denominator.shape).copy()
    return np.divide(numerator, denominator, out=answer, where=denominator != 0)


def _insert(
    sizes: IntArray, peaks: IntArray, size: IntArray, peak: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the slots with one size more on each row; a row already full loses one within.

    The one lost stands in the most crowded place. Its peak passes to the next larger size, which
    needs no less, so that what is forgotten never raises a cap.
    """
    sizes = np.concatenate([sizes, size[:, None]], axis=1)
    peaks = np.concatenate([peaks, peak[:, None]], axis=1)
    order = np.argsort(sizes, axis=1, kind="stable")
    sizes, peaks = np.take_along_axis(sizes, order, 1), np.take_along_axis(peaks, order, 1)

    row = np.arange(len(sizes))
    crowded = 1 + (sizes[:, 2:] - sizes[:, :-2]).argmin(axis=1)
    lost = np.where(sizes[:, 0] == 0, 0, crowded)
    peaks[row, lost + 1] = np.maximum(peaks[row, lost + 1], peaks[row, lost])
    keep = np.arange(sizes.shape[1]) != lost[:, None]
    return sizes[keep].reshape(len(sizes), -1), peaks[keep].reshape(len(sizes), -1)
