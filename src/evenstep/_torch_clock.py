"""Marks on the host or on a device, the seconds between them, and where a step's time goes by them.

All that watches training in PyTorch has its times from here: a balanced run, and a watch.
"""

from __future__ import annotations

import abc
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, final

import torch

from ._diagnosis import Phase, time_by_phase
from ._private_torch import compile_callbacks
from .exceptions import invalid


class AbstractClock(abc.ABC):
    """Sets marks, and measures the seconds between two of them once both have been reached.

    Attributes:
        mark: returns a mark for "when everything asked for so far is done". A step sets ten.
        is_late: whether a mark is reached later than it is set, so that a device is asked.
    """

    mark: Callable[[], Any]
    is_late: bool

    @abc.abstractmethod
    def seconds(self, begin: Any, end: Any) -> float | None:
        """Return the seconds from one mark to another; None while one of them is not reached."""

    @abc.abstractmethod
    def wait(self, mark: Any) -> None:
        """Block until ``mark`` is reached."""


@final
class HostClock(AbstractClock):
    """For work that is done when the call returns: CPU tensors.

    Args:
        now: a monotonic clock in seconds.
    """

    is_late = False

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.mark = now

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin

    def wait(self, mark: float) -> None:
        """Return at once: a mark on the host lies in the past."""


def _recorded(device: torch.device) -> Any:
    """Return an event that times, recorded on the current stream of ``device``."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event
    other = torch.Event(device, enable_timing=True)
    other.record(torch.accelerator.current_stream(device))
    return other


@final
class AcceleratorClock(AbstractClock):
    """For work queued on a device: events on the current stream, read without waiting.

    A wall clock around kernels measures their launch. An event is reached when the device gets
    there, and ``query`` asks without a synchronisation, so the host keeps running ahead; the
    price is that a step's time is often known one plan point later (``Exchange``).

    Args:
        device: the accelerator whose current stream is marked.
        record: returns an event that times, recorded on that stream.

    Raises:
        ValueError: the device has no events, or none that time.
    """

    is_late = True

    def __init__(
        self, device: torch.device, record: Callable[[torch.device], Any] = _recorded
    ) -> None:
        self.mark = partial(record, device)
        try:
            begin, end = self.mark(), self.mark()
            self.wait(end)
            self.seconds(begin, end)
        except (RuntimeError, NotImplementedError) as error:
            raise invalid(
                "Balancer.prepare(model)",
                "compute on a CPU, on CUDA, or on a device whose events torch can time",
                f"{device}: {error}",
                "A clock on the host would time when work is handed over, not when it is done. "
                "Train there with `EVENSTEP=off` in the environment.",
            ) from error

    def seconds(self, begin: Any, end: Any) -> float | None:
        # Both: of marks on two streams, the later one may be reached first.
        are_reached = end.query() and begin.query()
        return float(begin.elapsed_time(end)) / 1e3 if are_reached else None

    def wait(self, mark: Any) -> None:
        mark.synchronize()


def clock_of(device: torch.device) -> AbstractClock:
    """Return what times work on ``device``.

    Raises:
        ValueError: nothing does.
    """
    return HostClock() if device.type == "cpu" else AcceleratorClock(device)


_MOST_HELD = 32  # steps: at most so many are reported together
_MOST_UNREAD = 2 * _MOST_HELD  # their reports are held, or a device is not through yet


_Window = tuple[int, list[tuple[Any, Phase]]]
"""A step from its hand-out to the next one: marks, each with the phase that follows it."""


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
        mixes: whether computing and waiting for others cannot be separated.

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

    @property
    def phase(self) -> Phase:
        """The phase under way, by the newest mark."""
        return self._cuts[-1][1] if self._cuts else Phase.REST

    def drop(self) -> None:
        """Leave out the step under way, with all that it has until the next one begins."""
        self._step, self._cuts = -1, []

    def begin(self, step: int, *, at: Any) -> None:
        """End the step before, and begin ``step``: it is handed out, or used."""
        if self._step >= 0:
            self._cuts.append((at, Phase.REST))
            self._unread.append((self._step, self._cuts))
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
            spans = list(map(self._clock.seconds, marks, marks[1:]))
            lasted_s = [seconds for seconds in spans if seconds is not None]
            if len(lasted_s) < len(spans):  # on another stream, where marks come in another order
                break
            self._unread.popleft()
            if min(lasted_s) >= 0:
                found.append((step, time_by_phase(lasted_s, phases[:-1])))
        return found

    def _have_lasted(self, least_s: float) -> bool:
        """Return whether the unread steps lasted so long, or are as many as may be held."""
        unread = self._unread
        if not unread or len(unread) >= _MOST_HELD:
            return bool(unread)
        (_, first), (_, last) = unread[0], unread[-1]
        lasted_s = self._clock.seconds(first[0][0], last[-1][0])
        return lasted_s is not None and lasted_s >= least_s


@final
class CompileClock:
    """Counts the time in which something is compiled, once torch's compiler is there.

    Attributes:
        total_s: seconds so far.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._start, self._end = self._begins, self._ends  # once: they are looked for often
        self._begun_s: float | None = None
        self.total_s = 0.0

    def listen(self) -> None:
        """See to it that torch calls back; a reset of its compiler forgets us."""
        if self._handler is None:
            if "torch._dynamo" not in sys.modules:
                return
            self._handler = compile_callbacks()
        if self._start not in self._handler.start_callbacks:
            self._handler.register_start_callback(self._start)
        if self._end not in self._handler.end_callbacks:
            self._handler.register_end_callback(self._end)

    def close(self) -> None:
        """Count no more."""
        if self._handler is not None:
            if self._start in self._handler.start_callbacks:
                self._handler.remove_start_callback(self._start)
            if self._end in self._handler.end_callbacks:
                self._handler.remove_end_callback(self._end)

    def _begins(self, _: Any) -> None:
        self._begun_s = perf_counter()

    def _ends(self, _: Any) -> None:
        if self._begun_s is not None:
            self.total_s += perf_counter() - self._begun_s
            self._begun_s = None


def describe_device(device: torch.device) -> str:
    """Return the device with its model's name, where it has one."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return str(device)


def alloc_retries(device: torch.device) -> int:
    """Return how often the device's allocator gave back memory to find some; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
