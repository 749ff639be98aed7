"""What a rank knows of a step that it was handed, and who is called as its steps progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .._exchange._mailbox import UnitSum
from .._planner import Plan, Work


class StepObserver:
    """Is called in every step, on the thread that trains, while all ranks wait for it: be quick.

    A part that only some runs need is one of these. It overrides the methods it wants called; what
    no observer overrides is not called.
    """

    def begin_step(self, step: int) -> None:
        """Note that ``step`` begins: no backward is under way."""

    def first_forward(self, *, equal_forwards: bool) -> None:
        """Note that the step's first forward comes next: what is collective before it goes here.

        Args:
            equal_forwards: whether all ranks make as many in the step, and know it.
        """

    def begin_forward(self, num_samples: int, *, is_last: bool) -> None:
        """Note that a forward of so many samples comes next, perhaps the step's last one."""

    def backward_done(self) -> None:
        """Note that this rank's own backward is done: from now on it may wait for others."""

    def reduced(self) -> None:
        """Note that the collectives of that backward are over."""

    def check_over(self) -> None:
        """Raise if the step's backwards are over here, and what they reduce can never be."""

    def end_step(self, step: int) -> None:
        """Note that the last backward of ``step`` is over."""


def called_by(observers: Iterable[StepObserver], name: str) -> tuple[Callable[..., Any], ...]:
    """Return the methods of this name, of those observers that override it."""
    silent = getattr(StepObserver, name)
    return tuple(getattr(one, name) for one in observers if getattr(type(one), name) is not silent)


@dataclass(eq=False, slots=True)
class StepState:
    """A step from its hand-out to its report.

    Attributes:
        number: counted over the run.
        num_samples: this rank's.
        global_num_samples: of all ranks.
        data_s: seconds spent waiting for input.
        wall_s: seconds since the hand-out before it; None for the first of a loop.
        thread_id: of the thread that it was handed to.
        stopping: whether all ranks know, as of its plan, that one of them asked to stop.
        follows: whether its own time begins at the hand-out: nothing else was under way then.
        is_underrated: whether it had more backwards than were foreseen.
        is_used: whether one of its batches has had a forward.
        is_over: whether it is past its backwards, and another has begun.
        has_begun: whether the clock and the watches have begun with it.
        is_clear: whether its own time can be separated from that of other steps.
        units: of this rank; None where they are samples.
        unit_sum: where the sum over ranks will be found.
        num_forwards: micro-batches handed out, one in plain loops.
        num_backwards: that went through its batches.
        largest: size of its largest micro-batch, as ``Report.largest_forward``.
        again: whether memory ran out in it.
        on_last_forward: whether its last micro-batch is handed out.
        reported: whether it was reported to rank 0.
        work: what its samples cost; None where no costs are known.
        checksum: of who has which of its samples, the same on all ranks; 0 where none is known.
        plan: by which it was handed out; None where none is known.
        compares: whether ranks compare the scales of its gradients.
        equal_forwards: whether all ranks make as many forwards, and know it.
    """

    number: int
    num_samples: int
    global_num_samples: int
    data_s: float
    wall_s: float | None
    thread_id: int = 0
    stopping: bool = False
    follows: bool = True
    is_underrated: bool = False
    is_used: bool = False
    is_over: bool = False
    has_begun: bool = False
    is_clear: bool = True
    units: float | None = None
    unit_sum: UnitSum | None = None
    num_forwards: int = 0
    num_backwards: int = 0
    largest: int = 0
    again: bool = False
    on_last_forward: bool = False
    reported: bool = False
    work: Work | None = None
    checksum: int = 0
    plan: Plan | None = None
    compares: bool = False
    equal_forwards: bool = False


@dataclass(eq=False, slots=True)
class LoopPosition:
    """How far a loop is: which steps it was handed, and which it used.

    Attributes:
        newest: the newest step that was handed out; -1 before the first.
        newest_used: the newest one that had a backward; at first, the one before the first.
        num_batches: of the loop under way.
        looks_ahead: whether that loop ever fetched a batch before it had used another.
    """

    newest: int = -1
    newest_used: int = -1
    num_batches: int = 0
    looks_ahead: bool = False
    _before: int = -1  # the newest step at the end of the loop before
    _left_ahead: int = -1  # likewise, of a loop that trained and fetched ahead

    def begin(self, step: int) -> None:
        """Note which step is the first of this process: a resumed run keeps counting."""
        self.newest_used = self._before = step - 1

    def end_loop(self) -> None:
        """Note that the loop is over: what it fetched ahead may still be used."""
        if self.looks_ahead and self.newest_used > self._before:
            self._left_ahead = self.newest
        self._before = self.newest
        self.num_batches, self.looks_ahead = 0, False

    @property
    def next_unused(self) -> int | None:
        """The first step that was handed out and not used, else the next one; None before all.

        In a loop that fetches ahead, and after it if it trained; or where one is at hand. A loop
        that is over and used none of several has read them for another purpose.
        """
        newest = self.newest  # another thread may hand out meanwhile
        if newest < 0:
            return None
        ahead = newest - self.newest_used
        comes_again = self.looks_ahead or ahead == 1 or newest == self._left_ahead
        return self.newest_used + 1 if comes_again else newest + 1
