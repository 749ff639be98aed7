"""A clock for FSDP2 in plain loops: marks around collectives, and what steps they add up to."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from time import perf_counter_ns
from typing import Any, NamedTuple, final

import torch.distributed as dist

HANDOUT, OWN_END, CALL, CALLED, WAIT, WAITED = range(6)
BITS = 3  # of a note, below its time
COLLECTIVES = ("all_gather_single", "reduce_scatter_single", "all_reduce")  # as FSDP2 calls them


@final
class Ring:
    """Notes of one thread, the newest ``most`` of them, in an array that never grows.

    The thread that trains only writes. Another one reads what was written since it last did.

    Args:
        most: notes that there is room for, a power of two.

    Attributes:
        num_noted: how many notes were made.
        num_lost: how many the reader was too late for.
    """

    def __init__(self, most: int = 1 << 13) -> None:
        self._notes = array("q", bytes(8 * most))
        self._mask = most - 1
        self._num_read = 0
        self.num_noted = self.num_lost = 0
        self.thread_id = threading.get_ident()

    def note(self, what: int) -> None:
        """Write down that something is now."""
        self._notes[self.num_noted & self._mask] = perf_counter_ns() << BITS | what
        self.num_noted += 1

    def read(self) -> Iterator[tuple[int, int]]:
        """Yield what was noted since, each with its nanoseconds."""
        end = self.num_noted
        first = max(self._num_read, end - len(self._notes))
        self.num_lost += first - self._num_read
        for number in range(first, end):
            note = self._notes[number & self._mask]
            yield note & (1 << BITS) - 1, note >> BITS
        self._num_read = end


class Meeting(NamedTuple):
    """A collective, or a part of one.

    Attributes:
        begin_ns, end_ns: of the outermost call.
        calls: whether it begins the collective.
        waits: whether it waits for it.
    """

    begin_ns: int
    end_ns: int
    calls: bool
    waits: bool


@dataclass
class Step:
    """A step of one rank, from its hand-out to the next.

    Attributes:
        begin_ns: of the hand-out.
        end_ns: of own backward; 0 if none ended.
        next_ns: of the next hand-out.
        meetings: with others, the outermost calls alone.
        waited_ns: begin of the last ``Work.wait`` that is over.
    """

    begin_ns: int
    end_ns: int = 0
    next_ns: int = 0
    meetings: list[Meeting] = field(default_factory=list)
    waited_ns: int = -1

    @property
    def seconds(self) -> float:
        """All of it."""
        return (self.next_ns - self.begin_ns) / 1e9

    @property
    def own_s(self) -> float:
        """Own compute time: up to the end of own backward, less what collectives took."""
        ended = [each for each in self.meetings if each.end_ns <= self.end_ns]
        left_out = sum(each.end_ns - each.begin_ns for each in ended)
        return (self.end_ns - self.begin_ns - left_out) / 1e9

    @property
    def met_s(self) -> list[float]:
        """How long each collective took here, in their order."""
        return [(each.end_ns - each.begin_ns) / 1e9 for each in self.meetings]

    @property
    def parts_s(self) -> list[float]:
        """What lies before each collective, and after the last one."""
        ends = [self.begin_ns, *(each.end_ns for each in self.meetings)]
        begins = [*(each.begin_ns for each in self.meetings), self.next_ns]
        return [(begin - end) / 1e9 for begin, end in zip(begins, ends, strict=True)]


def steps_of(notes: Iterable[tuple[int, int]]) -> list[Step]:
    """Return the steps that are over, in order."""
    steps: list[Step] = []
    since: list[int] = []  # begins of what is under way
    for what, at in notes:
        if what == HANDOUT:
            if steps:
                steps[-1].next_ns = at
            steps.append(Step(at))
        elif steps:
            _work_out(steps[-1], since, what, at)
    return steps[:-1]


def _work_out(step: Step, since: list[int], what: int, at: int) -> None:
    """Take one note of a step.

    On one thread intervals are nested or apart, so that the outermost ones are their union.
    """
    if what == OWN_END:
        step.end_ns = at
    elif what in (CALL, WAIT):
        since.append(at)
    else:
        begin = since.pop()
        if what == WAITED:
            step.waited_ns = begin
        if not since:
            step.meetings.append(Meeting(begin, at, what == CALLED, step.waited_ns >= begin))


@contextmanager
def marked(ring: Ring) -> Iterator[None]:
    """Return a context in which collectives and their waits are noted; results stay theirs."""
    places = [(dist, name, CALL) for name in COLLECTIVES] + [(dist.Work, "wait", WAIT)]
    before = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, what), function in zip(places, before, strict=True):
        setattr(owner, name, noting(function, ring, what))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(places, before, strict=True):
            setattr(owner, name, function)


def noting(before: Callable[..., Any], ring: Ring, what: int) -> Callable[..., Any]:
    """Return a function that notes its begin and its end, on the thread that trains."""
    note, thread_id, ident = ring.note, ring.thread_id, threading.get_ident

    @wraps(before)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if ident() != thread_id:
            return before(*args, **kwargs)
        note(what)
        try:
            return before(*args, **kwargs)
        finally:
            note(what + 1)

    return noted


@final
class Reader:
    """Reads a ring on a thread of its own, some times a second.

    Attributes:
        notes: what was read so far.
    """

    def __init__(self, ring: Ring, *, every_s: float = 0.2) -> None:
        self.notes: list[tuple[int, int]] = []
        self._ring, self._every_s = ring, every_s
        self._closes = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> list[Step]:
        """Stop, and return the steps that were read."""
        self._closes.set()
        self._thread.join()
        self.notes.extend(self._ring.read())
        return steps_of(self.notes)

    def _read(self) -> None:
        while not self._closes.wait(self._every_s):
            self.notes.extend(self._ring.read())
