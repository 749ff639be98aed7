"""A step whose first samples a rank knows, and whose others it claims as it goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np

from ...._types import IntArray
from .._protocols import LoaderSteps, MicroBatch
from .._step import MicroBatches
from ..deal._plans import DealtPlan
from ..fetch._sources import BatchSource

_MOST_KEPT = 8  # an eighth of what a forward has


class Claimed(MicroBatches):
    """What one rank computes of a step whose samples are up for claims.

    DDP has to know at a forward whether its backward synchronises, so a rank always keeps some
    samples back: it computes the others, claims, and continues with what it kept and what it got,
    less what it keeps back now. If it got nothing, what it kept is its last forward. So claims
    come when they are due, and a step takes one forward more than it has claims.

    It keeps back one sample, or as many as keep together; where workers fetch, as many as it
    computes while they fetch as much as it claimed last. Those of its own part are here already.

    Samples keep the order of their positions within a forward. What was handed out is kept: a loop
    over the same step again gets it again, as it would without claims.

    Args:
        begun: what the forwards begin with.
        step: its number.
        opened: whose its samples are.
        source: of its other samples.
        fetched: what the source gave with the batches, for the others.
        steps: grants claims, and is notified when they begin and end.
        keys_of: returns the keys of slots; None where samples have none.
    """

    def __init__(
        self,
        begun: list[MicroBatch],
        step: int,
        opened: DealtPlan,
        *,
        source: BatchSource,
        fetched: Any,
        steps: LoaderSteps,
        keys_of: Callable[[IntArray], IntArray] | None = None,
    ) -> None:
        super().__init__(begun)
        self._step = step
        self._opened = opened
        self._source: Any = source
        self._fetched = fetched
        self._steps = steps
        self._keys_of = keys_of
        self._num_run = 0  # of the parts that are made, handed out
        self._due: deque[IntArray] = deque()  # slots of the forwards after those
        self._kept = opened.kept
        # When the newest samples were begun with, and how many were done by then.
        self._since: tuple[float, int] | None = None
        self._speed: float | None = None
        self.num_samples += len(self._kept)
        self._is_over = not self.num_samples  # no samples assigned: nothing to claim
        self.num_forwards = max(self.num_forwards, 1)

    def __iter__(self) -> Iterator[tuple[MicroBatch, bool]]:
        if self._since is None:
            self._since = perf_counter(), 0
        count = 0
        while count < len(self._parts) or self._continue():
            part, count = self._parts[count], count + 1
            self._num_run = max(self._num_run, count)
            self.num_forwards = self._num_run
            yield part, self._is_over and not self._due and count == len(self._parts)

    def whole(self) -> list[MicroBatch]:
        if not self._is_over:
            self._end_with(self._claim(own=True))
        while self._due:
            self._make(self._due.popleft())
        self.num_forwards = len(self._parts)
        return self._parts

    def _continue(self) -> bool:
        """Make what the next forward gets; return whether there is one."""
        while not self._due and not self._is_over:
            self._claim_more()
        if self._due:
            self._make(self._due.popleft())
            return True
        return False

    def _claim_more(self) -> None:
        """Claim, and see what goes into forwards now and what waits for the claim after."""
        claimed = self._claim()
        if not len(claimed):
            self._end_with(claimed)
            return
        if not self._source.request(
            self._fetched, claimed
        ):  # it takes a while: what is here comes first
            self._due.extend(self._cut(self._kept))
            self._kept = claimed[:0]
        held = np.sort(np.concatenate([self._kept, claimed]))
        num_now = len(held) - self._keep(len(claimed), len(held))
        self._due.extend(self._cut(held[:num_now]))
        self._kept = held[num_now:]

    def _end_with(self, claimed: IntArray) -> None:
        """Compute what was kept back and what was claimed, and nothing after that."""
        self._due.extend(self._cut(np.sort(np.concatenate([self._kept, claimed]))))
        self._kept = claimed[:0]
        self._is_over = True

    def _claim(self, *, own: bool = False) -> IntArray:
        """Return the slots that were claimed, ascending: the next ones, or all of its own."""
        self._steps.begin_claim()
        done = sum(part.num_samples for part in self._parts[: self._num_run])
        if self._since is not None and not own:
            (began_s, before), now_s = self._since, perf_counter()
            if done > before and now_s > began_s:
                self._speed = (done - before) / (now_s - began_s)
        granted = self._steps.claim(self._step, speed=self._speed, own=own)
        slots = [self._opened.claimed(claim) for claim in granted]
        claimed = np.sort(np.concatenate(slots)) if slots else self._kept[:0]
        self.num_samples += len(claimed)
        self._steps.end_claim(self._step, len(claimed))
        self._since = perf_counter(), done
        return claimed

    def _keep(self, num_claimed: int, num_held: int) -> int:
        """Return how many of the samples held wait for the claim after them."""
        tile = self._opened.tile
        meanwhile = (self._speed or 0.0) * self._source.fetch_s(num_claimed)
        tiles = min(int(meanwhile) // tile, num_held // tile // _MOST_KEPT)
        return min(tile * max(tiles, 1), num_held)

    def _cut(self, slots: IntArray) -> list[IntArray]:
        """Return the slots of each forward."""
        if not len(slots):
            return []
        sizes = self._opened.forwards(len(slots))
        return np.split(slots, np.cumsum(sizes)[:-1])

    def _make(self, slots: IntArray) -> None:
        """Make what a forward gets; a wait for it is no time of the model's."""
        self._steps.begin_claim()
        batch = self._source.batch(self._fetched, slots)
        self._steps.end_claim(self._step, 0)
        keys = None if self._keys_of is None else self._keys_of(slots)
        self._parts.append(MicroBatch(batch, len(slots), keys=keys))
