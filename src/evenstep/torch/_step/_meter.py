"""Where a rank's time goes, and its own compute time: hand-out to backward's end, less waits."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple, final

from ..._diagnosis import Phase, time_by_phase
from ..._planner import MOST_STEPS
from ._clock import AbstractClock

_MOST_UNREAD = 2 * MOST_STEPS  # steps: their reports are held, or a device is not through yet


class _Window(NamedTuple):
    """A step from its hand-out to the next one: marks, each with the phase that follows it."""

    step: int
    cuts: list[tuple[Any, Phase]]


@final
class Timeline:
    """Where one phase of a step ends and the next begins, by marks that were set on its thread.

    A step lasts until the next one is handed out, so that all of a loop's time lies in some step:
    evaluations, checkpoints and the ends of epochs too. The last step of a run never ends. Where
    batches are fetched ahead, a step lasts from its first forward to the next one's.

    The marks are the clock's. On a device they are events, and nothing waits for them: input is
    the time in which the device waits for it. That of an optimizer which is compiled, or is no
    ``torch.optim.Optimizer``, is ``Phase.REST``.

    Args:
        clock: sets the marks.
        mixes: whether computing and waiting for others cannot be told apart.

    Attributes:
        mixes: likewise, from now on: own computing goes to the rest then.
    """

    def __init__(self, clock: AbstractClock, *, mixes: bool = False) -> None:
        self.mixes = mixes
        self._clock = clock
        self._step = -1  # before the first
        self._cuts: list[tuple[Any, Phase]] = []
        self._phase = Phase.REST  # apart from what is inside of a block
        self._block: Phase | None = None  # the outermost one
        self._depth = 0  # of blocks
        self._unread: deque[_Window] = deque(maxlen=_MOST_UNREAD)

    @property
    def num_marks(self) -> int:
        """Number of marks in the step under way."""
        return len(self._cuts)

    def drop(self) -> None:
        """Leave out the step under way, with all that it has until the next one begins."""
        self._step, self._cuts = -1, []

    def begin(self, step: int, *, at: Any) -> None:
        """End the step before, and begin ``step``: it is handed out, or used."""
        if self._step >= 0:
            self._cuts.append((at, Phase.REST))
            self._unread.append(_Window(self._step, self._cuts))
        self._step, self._cuts = step, [(at, Phase.REST)]
        self._phase, self._block, self._depth = Phase.REST, None, 0

    def go(self, phase: Phase, *, at: Any) -> None:
        """Go over to a phase at a mark after all others."""
        if phase is not self._phase:
            self.cut(phase, at=at)

    def cut(self, phase: Phase, *, at: Any) -> int:
        """Go over to a phase, perhaps the same one; return the number of the mark."""
        if self.mixes and phase in (Phase.FORWARD, Phase.BACKWARD):
            phase = Phase.REST
        self._phase = phase
        if self._block is not None and phase is Phase.REST:
            phase = self._block
        cuts = self._cuts
        cuts.append((at, phase))
        return len(cuts) - 1

    def met(self, begin: Any, end: Any) -> None:
        """Note that others were waited for between two marks, after all others."""
        before = self._cuts[-1][1] if self._cuts else self._phase
        self._cuts += (begin, Phase.MEETING), (end, before)

    def met_since(self, cut: int) -> None:
        """Note that others were waited for in what was own computing since a mark."""
        for at in range(cut, len(self._cuts)):
            mark, phase = self._cuts[at]
            if phase in (Phase.FORWARD, Phase.REST):
                self._cuts[at] = mark, Phase.MEETING

    def was(self, phase: Phase, cut: int) -> None:
        """Note that what counted as the rest since a mark was ``phase``, as is known by now."""
        for at in range(cut, len(self._cuts)):
            mark, before = self._cuts[at]
            if before is Phase.REST:
                self._cuts[at] = mark, phase

    def fetched(self, at: Any) -> None:
        """Note that the input is there."""
        if self._phase is Phase.INPUT:
            self.cut(Phase.REST, at=at)

    def enter(self, phase: Phase, *, at: Any) -> bool:
        """Begin a block whose time is that of ``phase``; of several, the outermost counts.

        Return whether it does.
        """
        self._depth += 1
        if self._depth > 1:
            return False
        self._block = phase
        self._cuts.append((at, phase))
        return True

    def leave(self, *, at: Any) -> bool:
        """End it; not where the step was over before, as with an iterator that was left alone.

        Return whether it counted.
        """
        if not self._depth:
            return False
        self._depth -= 1
        if self._depth:
            return False
        self._block = None
        self._cuts.append((at, self._phase))
        return True

    def take(self, *, least_s: float = 0.0) -> list[tuple[int, tuple[int, ...]]]:
        """Return the steps whose end was reached since the last call, with their times.

        In microseconds, by phase. A step in which the clock went back is left out.

        Args:
            least_s: nothing is returned until so many seconds of steps are there, or many steps.
        """
        found: list[tuple[int, tuple[int, ...]]] = []
        if least_s and not self._have_lasted(least_s):
            return found
        while self._unread:
            step, cuts = self._unread[0]
            if self._clock.seconds(cuts[0][0], cuts[-1][0]) is None:
                break
            marks, phases = zip(*cuts, strict=True)
            told = list(map(self._clock.seconds, marks, marks[1:]))
            lasted_s = [seconds for seconds in told if seconds is not None]
            if len(lasted_s) < len(told):  # on another stream, where marks come in another order
                break
            self._unread.popleft()
            if min(lasted_s) >= 0:
                found.append((step, time_by_phase(lasted_s, phases[:-1])))
        return found

    def _have_lasted(self, least_s: float) -> bool:
        """Tell whether the unread steps lasted so long, or are as many as may be held."""
        unread = self._unread
        if not unread or len(unread) >= MOST_STEPS:
            return bool(unread)
        lasted_s = self._clock.seconds(unread[0].cuts[0][0], unread[-1].cuts[-1][0])
        return lasted_s is not None and lasted_s >= least_s


class StepMeter:
    """Measures one step after another: from the batch's hand-out to the end of own backward.

    ``compute_s`` = (last end of a backward - hand-out) - waits inside it, such as DDP's broadcast
    of buffers at the start of its forward. A step in which no backward ran has no time.

    The gaps between forwards and backwards are left out where a collective began in them, as with
    a loss that is averaged over ranks for a log before its backward: the fast ranks wait there for
    the slow one, and all would look alike. Only the rest of such a gap is lost, such as the loss
    itself. Collectives inside a model's forward cannot be told from computing.

    It is told of marks that were set, in their order, perhaps much later and on another thread.

    Args:
        clock: sets the marks.

    Attributes:
        clock: as given.
        timeline: what else the time of a step went to.
    """

    _mixes = False  # whether computing and waiting cannot be told apart

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
        """End it; one that goes on past its step is left out of none."""
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
    """Gives no time: for steps in which computing and waiting cannot be told apart."""

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
