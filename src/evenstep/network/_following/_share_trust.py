"""Whether predictions of an exchange hold, and when links or all-reduce are to be tried again."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np

from ..._types import FloatArray
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


FIRST_WAIT, LONGEST_WAIT = 50, 1600  # all-reduces between two probes of the links
PLAIN_WAIT = 100  # the first between two at all-reduce while links do not change
SETTLED = 4  # exchanges since links changed after which all-reduce may be tried
AFTER_CHANGE = 10  # exchanges between two such trials while links change
EVEN = 0.8  # rate of the slowest worker over the median, below which its link is the limit
NUM_LIKE, NUM_RECENT = 3, 5  # all-reduces in a row that show a change, and what one takes
LONGER = 1.05  # than shares took: all-reduce that was thought to be faster
MAY_COST = 0.02  # of all-reduces: what probes take more, in the long run
MOST_COST = 4.0  # all-reduces that a probe is taken to cost at most


class Probes:
    """Says when an exchange by shares is due that shows what the links are.

    Exchanges by shares that prove nothing may take several times as long as all-reduces. So probes
    are paid for: 2 % of what all-reduces take is saved up, to what the last probe cost, but four
    all-reduces at most; what a probe took more than all-reduces is spent. One that comes by the
    clock, or because all-reduce became faster, waits until it is saved for. If it became slower,
    the time lost that way counts as saved, and half as much whenever it is not: what lasts is
    probed within some steps, and what a busy machine does now and then is not. Probes that end in
    shares have paid for themselves, and the first one is free, as the links are unknown.
    """

    def __init__(self) -> None:
        self._wait = self._next_wait = FIRST_WAIT
        self._since = 0
        self._usual_s: float | None = None  # of all-reduce, when the links were last known
        self._measured = False  # that, or expected only
        self._shares_s = math.inf  # what shares took that all-reduce was found to be faster than
        self._chance = False  # the last probe was for their sake
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._saved_s = self._lost_s = 0.0  # less than 0 is owed; lost since the last probe
        self._probe_s = 0.0  # what the last probe cost

    def due(self, plain_s: float) -> str | None:
        """Return why one is due, if it is, after an all-reduce of ``plain_s``."""
        self._since += 1
        self._recent.append(plain_s)
        most_s = MOST_COST * (plain_s if self._usual_s is None else self._usual_s)
        cost_s = min(max(self._probe_s, 0.0), most_s)
        self._saved_s = min(self._saved_s + MAY_COST * plain_s, cost_s)
        reason = self._reason(plain_s, cost_s)
        if reason is not None:
            self._probe_s, self._lost_s = 0.0, 0.0
        return reason

    def spend(self, seconds: float) -> None:
        """Note by how much an exchange of a probe took longer than all-reduce."""
        self._probe_s += seconds
        if self._usual_s is not None:
            self._saved_s -= seconds

    def _reason(self, plain_s: float, cost_s: float) -> str | None:
        usual_s, affordable = self._usual_s, self._saved_s >= cost_s
        if usual_s is None:
            return "probing the links: they were never measured"
        last = [*self._recent][-NUM_LIKE:]
        if len(last) == NUM_LIKE:
            low, high, now_s = min(last), max(last), median(last)
            if not self._measured:  # that it is faster than expected does not speak against it
                self._measured, self._usual_s = True, min(now_s, usual_s)
                usual_s = self._usual_s
            slower, faster = low > usual_s * OTHER_TIME, high < usual_s / OTHER_TIME
            lost_s = max(plain_s - usual_s, 0.0)
            self._lost_s = self._lost_s + lost_s if slower else self._lost_s / 2
            if (slower and self._saved_s + self._lost_s >= cost_s) or (faster and affordable):
                return f"probing the links: all-reduce takes {now_s:.3g} s now"
        if self._since == NUM_RECENT and median(self._recent) > self._shares_s * LONGER:
            self._chance = True
            took = f"{median(self._recent):.3g} s, and shares took {self._shares_s:.3g} s"
            return f"probing the links: all-reduce takes {took}"
        if self._since >= LONGEST_WAIT or (affordable and self._since >= self._wait):
            return f"probing the links: the last probe was {self._since} steps ago"
        return None

    def done(self, plain_s: float | None, *, changed: bool, shares_s: float | None = None) -> None:
        """Note that the links are known.

        Args:
            plain_s: what all-reduce is expected to take now.
            changed: whether shares are used from now on.
            shares_s: what shares took, if they were tried: should five all-reduces take longer
                than that by 5 %, they get another chance, but not twice in a row.
        """
        if changed:
            self._next_wait, self._saved_s = FIRST_WAIT, max(self._saved_s, 0.0)
        else:
            self._wait, self._next_wait = self._next_wait, min(2 * self._next_wait, LONGEST_WAIT)
        self._since, self._usual_s, self._measured = 0, plain_s, False
        self._shares_s = math.inf if shares_s is None or self._chance else shares_s
        self._chance = False
        self._recent.clear()


class PlainTrials:
    """Says when a plain all-reduce is due, to see what it takes by now.

    Shares over servers without data show of a worker's link no more than those servers take from
    it, and all-reduce among the workers may be much faster than is known. So one exchange
    finds out now and then: some steps after links changed, but not within 10 of the last time,
    nor within 20, 40, ... and at most 100 where it was no faster once or more often; while links do
    not change, after 100, then 200, ... and at most 1600. It moves at most twice what shares do
    over a worker's link, so by the model it takes no more than twice as long.
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
        """Note that links of servers have changed."""
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
        """Return whether no worker was slower than the others, since links changed."""
        if len(self._rates) < SETTLED:
            return False
        mean = np.mean(self._rates, axis=0)
        return bool((mean.min(axis=1) >= EVEN * np.median(mean, axis=1)).all())
