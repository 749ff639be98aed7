"""What exchanges took over what was predicted, and when it is time to look at the links again."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np

from .._types import FloatArray
from ..sharding import SharePlan

FRESH = 10  # exchanges by shares for which an all-reduce before them says what one takes

FAILS_AT = 1.35
"""A prediction fails that the exchange takes so many times as long, five times in a row."""

FIRST_WAIT, LONGEST_WAIT = 25, 1600  # exchanges between two looks at the links
PLAIN_WAIT = 100  # the first between two at all-reduce while links do not change
SETTLED = 4  # exchanges since links changed after which all-reduce may be tried
AFTER_CHANGE = 10  # exchanges between two such trials while links change
EVEN = 0.8  # rate of the slowest worker over the median, below which its link is the limit
NUM_LIKE, NUM_RECENT = 3, 5  # all-reduces in a row that tell a change, and what one takes
MEASURED = 0.05  # gain over all-reduce by which shares win that were tried
OTHER_TIME = 1.2  # an all-reduce that takes longer by this factor, or shorter, has other links


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

    def see_plain(self, seconds: float) -> None:
        """Take in a plain all-reduce."""
        self._plain_s.append(seconds)
        self._since_plain = 0

    def see_shares(self, seconds: float, predicted_s: float) -> None:
        """Take in an exchange by shares, and what it takes by the model."""
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
        """Seconds by shares over those predicted, the median of the last 3 to 5; 1 before."""
        return median(self._ratios) if len(self._ratios) > 2 else 1.0

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
        plain_s = median(self._plain_s)
        measured = f"{shares_s:.3g} s against {plain_s:.3g} s of all-reduce, both as measured"
        if plain_s > shares_s * (1 + margin):
            return True, f"shares: {measured}"
        return False, f"plain all-reduce: shares take {measured}, no gain of {margin:.0%}"

    def judge(self, plan: SharePlan, margin: float) -> tuple[bool, str]:
        """Return whether shares win by ``margin`` as corrected, and why."""
        plain_s = plan.ring_s * self.plain_factor
        shares_s = plan.exchange_s * self.shares_factor
        wins = plain_s > shares_s * (1 + margin)
        if wins != plan.falls_back:
            return wins, plan.reason
        compared = f"{shares_s:.3g} s against {plain_s:.3g} s of all-reduce, both as measured"
        if wins:
            return True, f"shares: {compared}"
        return False, f"plain all-reduce: shares take {compared}, no gain of {margin:.0%}"


class Looks:
    """Says when an exchange by shares is due that shows what the links are."""

    def __init__(self) -> None:
        self._wait, self._since = FIRST_WAIT, 0
        self._usual_s: float | None = None  # of all-reduce, when the links were last known
        self._measured = False  # that, or expected only
        self._shares_s = math.inf  # what shares took in the look that they lost
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    def due(self, plain_s: float) -> str | None:
        """Return why one is due, if it is, after an all-reduce of ``plain_s``."""
        self._since += 1
        self._recent.append(plain_s)
        if self._usual_s is None:
            return "a look at the links: nobody has measured them"
        last = [*self._recent][-NUM_LIKE:]
        if len(last) == NUM_LIKE:
            low, high, now_s = min(last), max(last), median(last)
            if not self._measured:  # that it is faster than expected does not speak against it
                self._measured, self._usual_s = True, min(now_s, self._usual_s)
            if low > self._usual_s * OTHER_TIME or high < self._usual_s / OTHER_TIME:
                return f"a look at the links: all-reduce takes {now_s:.3g} s now"
        if self._since == NUM_RECENT and median(self._recent) > self._shares_s * (1 + MEASURED):
            took = f"{median(self._recent):.3g} s, and shares took {self._shares_s:.3g} s"
            return f"a look at the links: all-reduce takes {took}"
        if self._since >= self._wait:
            return f"a look at the links: the last one was {self._since} steps ago"
        return None

    def done(self, plain_s: float | None, *, changed: bool, shares_s: float | None = None) -> None:
        """Note that the links are known.

        Args:
            plain_s: what all-reduce is expected to take now.
            shares_s: what shares took, if they were tried: should five all-reduces take longer
                than thought, by ``MEASURED``, they get another chance.
            changed: whether shares are used from now on.
        """
        self._wait = FIRST_WAIT if changed else min(2 * self._wait, LONGEST_WAIT)
        self._since, self._usual_s, self._measured = 0, plain_s, False
        self._shares_s = math.inf if shares_s is None else shares_s
        self._recent.clear()


class PlainLooks:
    """Says when a plain all-reduce is due, to see what it takes by now.

    Shares over servers without data show of a worker's link no more than those servers take from
    it, and all-reduce among the workers may be much faster than anybody knows. So one exchange
    finds out now and then: some steps after links changed, but not within 10 of the last time,
    nor within 20, 40, ... and at most 100 where it was no faster once or more often; while links do
    not change, after 100, then 200, ... and at most 1600. It moves at most twice what shares do
    over a worker's link, so it takes twice as long at the very most.
    A worker that others are faster than, in the mean of the last four exchanges, has a full link,
    and all-reduce fills it for longer: then nothing is tried. Where all servers work, the slowest
    link limits both, and there is nothing to find out.
    """

    def __init__(self) -> None:
        self._wait, self._since = PLAIN_WAIT, 0
        self._apart = AFTER_CHANGE
        self._changed = False
        self._rates: deque[FloatArray] = deque(maxlen=SETTLED)

    def changed(self) -> None:
        """Note that links have changed."""
        self._changed = True
        self._rates.clear()

    def see(self, rates: FloatArray) -> None:
        """Take in the rates of workers in an exchange by shares, ``(2, num_workers)``."""
        self._rates.append(rates)

    def due(self) -> bool:
        """Return whether one is due, after an exchange by shares."""
        self._since += 1
        return self._since >= (self._apart if self._changed else self._wait) and self._is_even()

    def done(self, *, faster: bool) -> None:
        """Note that it was made, and whether it was faster than shares."""
        self._apart = AFTER_CHANGE if faster else min(2 * self._apart, PLAIN_WAIT)
        self._wait = PLAIN_WAIT if self._changed else min(2 * self._wait, LONGEST_WAIT)
        self._since, self._changed = 0, False

    def _is_even(self) -> bool:
        """Tell whether no worker was slower than the others, since links changed."""
        if len(self._rates) < SETTLED:
            return False
        mean = np.mean(self._rates, axis=0)
        return bool((mean.min(axis=1) >= EVEN * np.median(mean, axis=1)).all())
