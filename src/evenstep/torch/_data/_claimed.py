"""A step of which a rank knows the beginning, and claims the rest as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np

from ..._types import IntArray
from ._plans import PlanBook
from ._protocols import PlanSource, StepListener
from ._source import Feed
from ._step import MicroBatch, StepSpan

_MOST_KEPT = 8  # an eighth of what a forward has


class Claimed:
    """What one rank computes of a step whose samples are up for claims.

    DDP has to know at a forward whether its backward synchronises, so a rank always keeps some
    samples back: it computes the others, claims, and goes on with what it kept and what it got,
    less what it keeps back now. If it got nothing, what it kept is its last forward. So claims
    come when they are due, and a step takes one forward more than it has claims.

    It keeps back one sample, or as many as keep together; where workers fetch, as many as it
    computes while they fetch as much as it claimed last. Those of its own part are here already.

    Samples keep the order of their positions within a forward.

    Args:
        begun: what the forwards begin with.
        span: where the step lies.
        feed: its other samples.
        book: whose they are.
        plans: grants claims.
        listener: told when claims begin and end.
        clock: monotonic seconds.

    Attributes:
        num_samples: samples so far.
        num_forwards: forwards so far.
    """

    def __init__(
        self,
        begun: Sequence[MicroBatch],
        span: StepSpan,
        *,
        feed: Feed,
        book: PlanBook,
        plans: PlanSource,
        listener: StepListener,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._begun = list(begun)
        self._kept = book.kept(span)
        self._span = span
        self._feed = feed
        self._book = book
        self._plans = plans
        self._listener = listener
        self._clock = clock
        self._all: list[MicroBatch] | None = None
        self._since = 0.0, 0  # when the newest samples were begun with, and how many are done
        self._speed: float | None = None
        self.num_samples = sum(part.num_samples for part in begun) + len(self._kept)
        self.num_forwards = max(len(self._begun), 1)

    def __iter__(self) -> Iterator[tuple[MicroBatch, bool]]:
        if self._all is not None or not self.num_samples:  # nobody planned for claims for nobody
            last = len(self.whole()) - 1
            yield from ((part, index == last) for index, part in enumerate(self.whole()))
            return
        self._since = self._clock(), 0
        self.num_forwards = 0
        for part in self._begun:
            yield self._counted(part), False
        while len(claimed := self._claim()):
            if not self._feed.request(claimed):  # that takes a while: go on with what is here
                for part in self._batches(self._kept):
                    yield part, False
                self._kept = claimed[:0]
            held = np.sort(np.concatenate([self._kept, claimed]))
            keep = self._keep(len(claimed), len(held))
            self._kept = held[len(held) - keep :]
            for part in self._batches(held[: len(held) - keep]):
                yield part, False
        *early, last_part = self._batches(self._kept)
        for part in early:
            yield part, False
        yield last_part, True

    def whole(self) -> Sequence[MicroBatch]:
        if self._all is None:
            own = self._claim(own=True) if self.num_samples else self._kept
            held = np.sort(np.concatenate([self._kept, own]))
            self._all = [*self._begun, *self._batches(held)]
            self.num_forwards = len(self._all)
        return self._all

    def _claim(self, *, own: bool = False) -> IntArray:
        """Return the slots that were claimed, ascending: the next ones, or all of its own."""
        self._listener.begin_claim()
        began_s, before = self._since
        now_s, done = self._clock(), self.num_samples - len(self._kept)
        if not own and done > before and now_s > began_s:
            self._speed = (done - before) / (now_s - began_s)
        granted = self._plans.claim(self._span.step, speed=self._speed, own=own)
        slots = [self._book.claimed(self._span, claim) for claim in granted]
        claimed = np.sort(np.concatenate(slots)) if slots else self._kept[:0]
        self.num_samples += len(claimed)
        self._listener.end_claim(len(claimed))
        self._since = self._clock(), done
        return claimed

    def _keep(self, num_claimed: int, num_held: int) -> int:
        """Return how many of the samples held wait for the claim after them."""
        tile = self._book.tile(self._span)
        meanwhile = (self._speed or 0.0) * self._feed.fetch_s(num_claimed)
        tiles = min(int(meanwhile) // tile, num_held // tile // _MOST_KEPT)
        return min(tile * max(tiles, 1), num_held)

    def _batches(self, slots: IntArray) -> Iterator[MicroBatch]:
        """Yield what the forwards get; a wait for it is no time of the model's."""
        if not len(slots):
            return
        sizes = self._book.forwards(self._span, len(slots))
        for part in np.split(slots, np.cumsum(sizes)[:-1]):
            self._listener.begin_claim()
            batch = self._feed.batch(part)
            self._listener.end_claim(0)
            yield self._counted(MicroBatch(batch, len(part)))

    def _counted(self, part: MicroBatch) -> MicroBatch:
        self.num_forwards += 1
        return part
