"""The clock of the thread that trains: it notes marks; what they mean is worked out elsewhere.

A rank's own time goes from the hand-out of its batch to the end of its backward, less waits.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import call
from time import perf_counter
from typing import Any, NamedTuple, final
from weakref import WeakSet

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..._diagnosis import Phase
from ..._nested_tensors import input_size
from ..._private_torch import CollectiveCount
from ..._run._machine_reader import ClueReader
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
        mixes: whether computing and waiting cannot be distinguished, so that no step has a time.

    Attributes:
        clock: as given.
        timeline: what else the time of a step went to.
    """

    def __init__(self, clock: AbstractClock, *, mixes: bool = False) -> None:
        self.clock = clock
        self.timeline = Timeline(clock, mixes=mixes)
        self._mixes = mixes
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
        self._waits.append((begin, end))
        self.timeline.go(Phase.FORWARD, at=end)

    def exclude(self, begin: Any, end: Any) -> None:
        """Leave the time between two marks out: it was spent waiting for others."""
        self._waits.append((begin, end))
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
                self._waits.append((begin, at))

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
                self._waits.append((begin, at))
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
            self._waits.append((begin, at))
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
        if self._mixes or self._begin is None or self._end is None:
            return None
        return PendingTime(self.clock, self._begin, self._end, tuple(self._waits))


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


_STEPS = 3  # of a look
_SECOND = 8  # the step at which it begins; each look after that comes at twice the steps


class Looks:
    """The one schedule of looks; this one has none, as where every weight is 1.

    The first look begins with the run, the others at steps 8, 16, 32 and so on. An optimizer is
    also looked at when it takes its first step, whenever that is. Outside of looks no hook is left,
    and the thread that trains compares one number in each step.

    Attributes:
        due: how many steps are over when the next look begins, or when the one under way ends.
        is_open: whether one is under way.
        optimizers: those that have taken a step.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self.is_open = False
        self.optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()

    def turn(self, num_steps: int) -> None:
        """Begin a look, or end the one under way, after so many steps."""
        self.is_open = not self.is_open
        if self.is_open:
            self.due = num_steps + _STEPS
        else:
            self.due = max(_SECOND, 1 << num_steps.bit_length())

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer steps: for the first time, or in a look."""
        self.optimizers.add(optimizer)


MOST_NOTES = 1 << 12
"""Of some hundred steps: more than the reader falls behind, unless it is stopped."""


@final
class Recorder:
    """Notes what a step comes to, with a mark each, on the thread that trains.

    A note is a method of the meter and what it is called with, later and in order, by whichever
    thread makes the report (``settle``). A mark on a device is an event, which is set only where
    something begins or ends.

    The time that an optimizer takes is known by torch's hooks on the steps of all optimizers of
    this process.

    Args:
        meter: makes times of marks.
        count: how many collectives this process has begun; None with no other rank to wait for,
            or where none can be distinguished from computing.
        clues: makes more of what was noted; None where no other rank would wait.

    Attributes:
        clock: of the meter.
        mark: of the clock.
        meter, clues: as given.
        thread_id: of the thread that trains; 0 before the first step.
        looks: are notified of optimizers.
        handles: of what notes something here, removed at the close.
        notes: what is not worked out yet.
        note: has a call made once all so far is worked out; a tuple with what it is called with.
    """

    def __init__(
        self,
        meter: StepMeter,
        count: CollectiveCount | None = None,
        clues: ClueReader | None = None,
    ) -> None:
        self.clock = meter.clock
        self.mark = meter.clock.mark
        self.meter = meter
        self._count = count
        self._numbers = [] if count is None else count.numbers
        if count is not None:
            count.renew()
        self.clues = clues
        self.notes: deque[tuple[Any, ...]] = deque()
        self.note = self.notes.append
        self._settling = threading.RLock()
        self.thread_id = 0
        self._in_fetch = False
        self._gap: int | None = None  # collectives at its begin; None outside of one
        self._had_others = False
        self._is_gap = False  # whether the newest note began one
        self._newest_grad: Any = None
        self._paused: tuple[Any, float] = (None, 0.0)
        self.looks = Looks()
        self.handles = _optimizer_hooks(weakref.ref(self))

    def next_step(self, number: int) -> None:
        """End the step before, and begin one: it is handed out, or used."""
        self.thread_id = threading.get_ident()
        self.note((partial(self.meter.timeline.begin, number, at=self.mark()),))
        if (clues := self.clues) is not None:
            seconds = clues.garbage.total_s, clues.compiling.total_s
            self.note((clues.begin_step, number, *seconds, threading.get_native_id()))

    def saw_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note what the next forward is given."""
        if (clues := self.clues) is None:
            return
        if len(tensors) == 1 and tensors[0].dim():  # as nearly always
            self.note((clues.saw_inputs, tensors[0].size(0), tensors[0].numel()))
        else:
            self.note((clues.saw_inputs, *input_size(tensors)))

    def begin(self) -> None:
        """Start the clock of a step: its batch is being handed out."""
        self._in_fetch, self._newest_grad, self._is_gap = False, None, True
        self._gap = sum(map(call, self._numbers))
        self.note((self.meter.begin, self.mark()))

    def begin_fetch(self, *, in_step: bool) -> None:
        """Note that the loop comes back for another batch, perhaps in the middle of a step."""
        if in_step:
            self.close_gap()
        self._gap, self._in_fetch, self._is_gap = None, in_step, False
        self.note((partial(self.meter.begin_fetch, in_step=in_step), self.mark()))

    def end_fetch(self) -> None:
        """Note that the batch is there."""
        if self._in_fetch:
            self._in_fetch, self._is_gap = False, True
            self._gap = sum(map(call, self._numbers))
        self.note((self.meter.end_fetch, self.mark()))

    def open_gap(self) -> None:
        """Note that a forward or a backward is over."""
        self._is_gap = True
        self._gap = sum(map(call, self._numbers))
        self.note((self.meter.open_gap, self.mark()))

    def close_gap(self, then: Phase = Phase.FORWARD) -> None:
        """Note that the next one begins."""
        met = False
        if self._gap is not None and (count := self._count) is not None:
            if len(count.groups) != len(count.numbers):
                met = True
                count.renew()
            elif sum(map(call, self._numbers)) != self._gap:
                met = True
            self._gap = None
            self._had_others |= met
        was_gap, self._is_gap = self._is_gap, False
        if was_gap and not met and then is Phase.FORWARD:
            return  # as which the gap counts: no mark is needed
        self.note((partial(self.meter.close_gap, met=met), self.mark(), then))

    def grad_ready(self) -> None:
        """Note that a parameter got its gradient: the last one's ends own backward.

        For backwards at whose end others have been waited for already (``NestedBackwards``).
        """
        self._newest_grad = self.mark()

    def end(self) -> None:
        """Note that own backward is done."""
        at, self._newest_grad = self._newest_grad, None
        self.note((self.meter.end, self.mark() if at is None else at))

    def waited(self, *, opens: bool = False) -> None:
        """Note that the reduction after a backward is over, and perhaps that a gap begins there."""
        at = self.mark()
        self.note((self.meter.waited, at))
        if opens:
            self._is_gap = True
            self._gap = sum(map(call, self._numbers))
            self.note((self.meter.open_gap, at))

    def pause(self) -> None:
        """Wait until all so far is done: what follows is a wait for input, until ``resume``."""
        begin = self.mark()
        self.clock.wait(begin)
        self._paused = begin, perf_counter()

    def resume(self) -> float:
        """Return how many seconds that took."""
        begin, began_s = self._paused
        self.note((self.meter.pause, begin, self.mark()))
        return perf_counter() - began_s

    def exclude(self, begin: Any, end: Any) -> None:
        """Leave the time between two marks out: it was spent waiting for others."""
        self.note((self.meter.exclude, begin, end))

    @contextmanager
    def block(self, phase: Phase) -> Iterator[None]:
        """Return a context whose time is that of ``phase``, such as an evaluation: no computing.

        One that continues past its step is left out of none: a loop over an evaluation may be left
        alone, and its iterator ends when Python drops it. On another thread it counts nothing.
        """
        counts = threading.get_ident() == self.thread_id
        if counts:
            self.note((self.meter.enter, self.mark(), phase))
        try:
            yield
        finally:
            if counts and threading.get_ident() == self.thread_id:
                self.note((self.meter.leave, self.mark()))

    @property
    def has_others(self) -> bool:
        """Whether the script has collectives of its own, as far as they began in gaps."""
        gap = self._gap  # another thread asks
        open_one = gap is not None and self._count is not None and self._count() != gap
        return self._had_others or open_one

    def settle(self) -> None:
        """Work out what was noted, on the calling thread."""
        notes = self.notes
        with self._settling:
            while notes:
                what, *given = notes.popleft()
                what(*given)

    def take_times(self, *, least_s: float) -> list[tuple[int, tuple[int, ...]]]:
        """Return the steps that are over by now with their times; see ``Timeline.take``."""
        with self._settling:
            return self.meter.timeline.take(least_s=least_s)

    def close(self) -> None:
        """Take the hooks off: nothing more is noted."""
        for handle in self.handles:
            handle.remove()


def _optimizer_hooks(recorder: weakref.ref[Recorder]) -> list[Any]:
    """Notify a recorder of the steps of optimizers, as long as it lives.

    A step that is compiled runs no hook: in its graph a hook would be a break.
    """

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or (alive := recorder()) is None:
            return
        if threading.get_ident() == alive.thread_id:
            if (looks := alive.looks).is_open or optimizer not in looks.optimizers:
                looks.before_optimizer(optimizer)
            enter = alive.meter.timeline.enter
            alive.note((partial(enter, Phase.OPTIMIZER, at=alive.clock.mark()),))

    def after(*_: Any) -> None:
        if torch.compiler.is_compiling() or (alive := recorder()) is None:
            return
        if threading.get_ident() == alive.thread_id:
            alive.note((partial(alive.meter.timeline.leave, at=alive.clock.mark()),))

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
