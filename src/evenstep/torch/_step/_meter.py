"""A rank's own compute time in a step: from the hand-out to the backward's end, less waits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, final

from ..._diagnosis import Phase
from ..._torch_clock import AbstractClock, Timeline


class StepMeter:
    """Measures one step after another: from the batch's hand-out to the end of own backward.

    ``compute_s`` = (last end of a backward - hand-out) - waits inside it, such as DDP's broadcast
    of buffers at the start of its forward. A step in which no backward ran has no time.

    The gaps between forwards and backwards are left out where a collective began in them, as with
    a loss that is averaged over ranks for a log before its backward: the fast ranks wait there for
    the slow one, and all would look alike. Only the rest of such a gap is lost, such as the loss
    itself. Collectives inside a model's forward cannot be distinguished from computing.

    It receives the marks that were set, in their order, perhaps much later and on another thread.

    Args:
        clock: sets the marks.

    Attributes:
        clock: as given.
        timeline: what else the time of a step went to.
    """

    _mixes = False  # whether computing and waiting cannot be distinguished

    def __init__(self, clock: AbstractClock) -> None:
        self.clock = clock
        self.timeline = Timeline(clock, mixes=self._mixes)
        self._gap: tuple[Any, int] | None = None
        self._fetch: Any = None
        self._block: tuple[Any, Any] | None = None
        self._begin: Any = None
        self._end: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._wait_after: tuple[Any, Any] | None = None

    def begin(self, at: Any) -> None:
        """Start a step: its batch is being handed out."""
        self._begin, self._end, self._waits = at, None, []
        self._wait_after = self._fetch = None
        self.open_gap(at)

    def pause(self, begin: Any, end: Any) -> None:
        """Leave a wait for input out, between two marks."""
        self.timeline.go(Phase.INPUT, at=begin)
        self._leave_out(begin, end)
        self.timeline.go(Phase.FORWARD, at=end)

    def exclude(self, begin: Any, end: Any) -> None:
        """Leave the time between two marks out: it was spent waiting for others."""
        self._leave_out(begin, end)
        self.timeline.met(begin, end)

    def enter(self, at: Any, phase: Phase) -> None:
        """Begin a block whose time is that of ``phase``, such as an evaluation: no computing."""
        if self.timeline.enter(phase, at=at):
            self._block = self._begin, at

    def leave(self, at: Any) -> None:
        """End it; one that continues past its step is left out of none."""
        if self.timeline.leave(at=at) and self._block is not None:
            (step, begin), self._block = self._block, None
            if self._begin is step:
                self._leave_out(begin, at)

    def open_gap(self, at: Any) -> None:
        """Note that a forward or a backward is over, or a batch is handed out."""
        self._gap = at, self.timeline.cut(Phase.FORWARD, at=at)

    def close_gap(self, at: Any, then: Phase, *, met: bool) -> None:
        """Note that the next one begins.

        Args:
            at: when.
            then: what begins.
            met: whether a collective began in the gap, which is left out then.
        """
        if self._gap is not None:
            (begin, cut), self._gap = self._gap, None
            if met:
                self._leave_out(begin, at)
                self.timeline.met_since(cut)
        self.timeline.go(then, at=at)

    def begin_fetch(self, at: Any, *, in_step: bool) -> None:
        """Note that the loop comes back for another batch, perhaps in the middle of a step."""
        self._fetch = at if in_step else None
        self._gap = None
        self.timeline.go(Phase.PLAN, at=at)

    def end_fetch(self, at: Any) -> None:
        """Note that it has it: the time for that is no computing."""
        self.timeline.fetched(at)
        if self._fetch is not None:
            begin, self._fetch = self._fetch, None
            self._leave_out(begin, at)
            self.open_gap(at)

    def end(self, at: Any) -> None:
        """Note that own backward is done; of several in one step the last one counts."""
        if self._wait_after is not None:  # for the reduction of the backward before
            self._waits.append(self._wait_after)
            self._wait_after = None
        self._end = at
        self.timeline.go(Phase.REDUCTION, at=at)

    def waited(self, at: Any) -> None:
        """Note that the reduction after a backward is over; the last one's is past the end."""
        self.timeline.go(Phase.REST, at=at)
        if self._end is not None:
            self._wait_after = (self._end, at)

    def take(self) -> PendingTime | None:
        """Return the step's time, perhaps not yet reached; None if no backward ran."""
        if self._begin is None or self._end is None:
            return None
        return PendingTime(self.clock, self._begin, self._end, tuple(self._waits))

    def _leave_out(self, begin: Any, end: Any) -> None:
        self._waits.append((begin, end))


@final
class BlindMeter(StepMeter):
    """Gives no time: for steps in which computing and waiting cannot be distinguished."""

    _mixes = True

    def take(self) -> None:
        """Return None."""


class PendingTime(NamedTuple):
    """A step's compute time, known as soon as the device has got there.

    Attributes:
        clock: set the marks.
        begin, end: of the step.
        waits: pairs of marks, the time between which is left out; they may overlap.
    """

    clock: AbstractClock
    begin: Any
    end: Any
    waits: tuple[tuple[Any, Any], ...]

    def seconds(self, *, block: bool = False) -> float | None:
        """Return the seconds; None while they are not known, and ``block`` is off."""
        if block:
            self.clock.wait(self.end)
        total = self.clock.seconds(self.begin, self.end)
        if total is None:
            return None
        if total < 0:
            return total  # a clock that went back: to be refused, not planned by
        return max(total - self._waited_s(total), 1e-9)  # a clock may not resolve an empty step

    def _waited_s(self, total: float) -> float:
        """Return the seconds of the step that lie in some wait: what lies in two counts once."""
        waited = reached = 0.0
        for begin, end in sorted((self._at(begin), self._at(end)) for begin, end in self.waits):
            first, last = max(begin, reached), min(end, total)
            if last > first:
                waited, reached = waited + last - first, last
        return waited

    def _at(self, mark: Any) -> float:
        """Return when a mark was reached, from the begin on; never is past the end."""
        at = self.clock.seconds(self.begin, mark)
        return math.inf if at is None else at
