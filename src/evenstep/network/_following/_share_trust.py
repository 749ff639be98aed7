"""What exchanges took over what was predicted."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from .._plans._share_plan import SharePlan

FRESH = 10  # exchanges by shares for which an all-reduce before them says what one takes
OTHER_TIME = 1.2  # what takes longer by this factor, or shorter, goes over other links
POSSIBLE = 0.7  # of what a ring takes on links as they are known: less is no reading of theirs
SAVED_UP = 2**18  # bytes that shaped links may have let through at once
PROVEN = 5  # impossible readings in a row that are true: links are faster than was known

FAILS_AT = 1.35
"""A prediction fails that the exchange takes so many times as long, five times in a row."""


class Trust:
    """Corrects predictions by what was measured, and says when they fail.

    Attributes:
        plain_factor: seconds of all-reduce as measured over those of a ring, when last compared.
    """

    def __init__(self) -> None:
        self.plain_factor = 1.0
        self._plain_s: deque[float] = deque(maxlen=3)
        self._shares_s: deque[float] = deque(maxlen=5)
        self._ratios: deque[float] = deque(maxlen=5)
        self._since_plain = 0  # exchanges by shares
        self._plan_epoch, self._last_s = -1, math.inf  # of the last one of them
        self._possible, self._impossible = POSSIBLE, list[float]()  # parts of a ring, in a row

    def see_plain(self, seconds: float) -> None:
        """Take in a plain all-reduce."""
        self._plain_s.append(seconds)
        self._since_plain = 0

    def problem(self, seconds: float, ring_s: float, num_bytes: int) -> tuple[int, str] | None:
        """Return rank 0, and why a plain all-reduce cannot have taken so little, if it cannot.

        Ranks begin a step at slightly different times, so one may seem to be over in a third of its
        time. It is refused unless five in a row say so: then links are faster than was known, or
        the backward hides a part of it, and what takes as long from then on is believed at once.

        Args:
            seconds: what it seems to have taken.
            ring_s: what a ring takes on the links as they are known.
            num_bytes: that are summed.
        """
        part = seconds / (ring_s * max(1 - SAVED_UP / num_bytes, 1e-9))
        if part >= self._possible:
            self._impossible.clear()
            return None
        self._impossible.append(part)
        if len(self._impossible) == PROVEN:
            self._possible = POSSIBLE * median(self._impossible)
            self._impossible.clear()
            return None
        return 0, f"an all-reduce in {seconds:.3g} s, on links that take {ring_s:.3g} s"

    def see_shares(self, seconds: float, predicted_s: float, *, plan_epoch: int) -> None:
        """Take in an exchange by shares, and what it takes by the model."""
        like = 1 / OTHER_TIME < seconds / self._last_s < OTHER_TIME
        if plan_epoch == self._plan_epoch and not like:
            self._since_plain = FRESH  # the links may have changed
        self._plan_epoch, self._last_s = plan_epoch, seconds
        self._shares_s.append(seconds)
        self._ratios.append(seconds / predicted_s)
        self._since_plain += 1

    def forget_plain(self) -> None:
        """Leave out plain all-reduces so far: links have changed."""
        self._plain_s.clear()

    def compare_plain(self, ring_s: float) -> None:
        """Compare the last all-reduces with the ring on the links as they are known just now.

        Until some exchanges later: what those say of links that they did not fill changes what is
        thought of a ring, and not what it took.
        """
        if self._plain_s and ring_s > 0 and self._since_plain <= FRESH:
            self.plain_factor = median(self._plain_s) / ring_s

    @property
    def plain_s(self) -> float | None:
        """Median of the last all-reduces; None before the first."""
        return median(self._plain_s) if self._plain_s else None

    @property
    def shares_factor(self) -> float:
        """Seconds by shares over those predicted, the median of the last 3 to 5.

        Before, as much as all-reduce took over its prediction, if that was more: what slows one
        exchange down on links that were probed slows the other down too.
        """
        return median(self._ratios) if len(self._ratios) > 2 else max(1.0, self.plain_factor)

    def promises(self, predicted_s: float, most: float) -> bool:
        """Return whether shares that take so long by the model may take ``most`` of all-reduce.

        Corrected by the newest exchange alone, as of a probe there is but one.
        """
        if not (self._ratios and self._plain_s):
            return True
        return predicted_s * self._ratios[-1] <= most * median(self._plain_s)

    def forget_shares(self) -> None:
        """Leave out exchanges by shares so far."""
        self._shares_s.clear()
        self._ratios.clear()

    def complaint(self, ring_s: float) -> str | None:
        """Return what is wrong with predictions, if they fail.

        Args:
            ring_s: of plain all-reduce, by the model.
        """
        full = len(self._ratios) == self._ratios.maxlen
        if not full or min(self._ratios) <= FAILS_AT:
            return None
        plain_s, took_s = ring_s * self.plain_factor, median(self._shares_s)
        if took_s <= plain_s:
            return None
        return (
            f"plain all-reduce: shares took {took_s:.3g} s, {self.shares_factor:.2f} times what "
            f"was predicted and more than its {plain_s:.3g} s"
        )

    def best_of(self, last: int) -> float:
        """Return the least seconds of so many last exchanges by shares; there was one at least."""
        return min([*self._shares_s][-last:])

    def usual_of(self, last: int) -> float:
        """Return the median of so many last exchanges by shares; there was one at least."""
        return median([*self._shares_s][-last:])

    def compared(self, shares_s: float, margin: float) -> tuple[bool, str]:
        """Return whether shares that took so long win over the last all-reduces, and why.

        Whatever was predicted: of use while all-reduce was measured on links as they are.
        """
        assert self._plain_s
        return _verdict(shares_s, median(self._plain_s), margin, "as measured")

    def judge(self, plan: SharePlan, margin: float) -> tuple[bool, str]:
        """Return whether shares win by ``margin`` as corrected, and why."""
        plain_s = plan.ring_s * self.plain_factor
        shares_s = plan.exchange_s * self.shares_factor
        wins = plain_s > shares_s * (1 + margin)
        if wins != plan.falls_back:
            return wins, plan.reason
        return _verdict(shares_s, plain_s, margin, "corrected by what both took before")


def _verdict(shares_s: float, plain_s: float, margin: float, how: str) -> tuple[bool, str]:
    """Return whether shares win by ``margin``, and why."""
    both = f"{shares_s:.3g} s against {plain_s:.3g} s of all-reduce, {how}"
    if plain_s > shares_s * (1 + margin):
        return True, f"shares: {both}"
    return False, f"plain all-reduce: shares take {both}, no gain of {margin:.0%}"
