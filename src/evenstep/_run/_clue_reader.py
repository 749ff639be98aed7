"""What this process notices beside the times of its steps, for rank 0: where it says something."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol, final

from .._diagnosis import HostClues, StepClues
from .._exchange._internal import log_fault
from .._exchange._message_kinds import CluesReport, HostReport
from .._host import HostReader

_LEAST_S = 2e-4  # of collecting or compiling: less of it waits, and is reported with the next
_EVERY_S = 1.0  # from one look at the process and its machine to the next
_MOST_UNTOLD = 128  # steps whose report is held, or whose device is not through yet
_CONTINUES = "Training and balancing continue; causes of waiting are found by times alone."


class SecondsClock(Protocol):
    """Counts the time of something.

    Attributes:
        total_s: seconds so far.
    """

    total_s: float


@final
class ClueReader:
    """Makes clues of what was noted in steps, and reads the system's files once a second.

    A step is reported if it had garbage collection, compilation or samples of another length. The
    length is the size of its inputs less what as many samples of this rank have in the mean, so a
    larger batch is not a longer one. Where samples are assigned by cost, a rank has fewer of them
    the longer they are. Then it is the size less this rank's mean.

    The thread that trains notes what its step had; whatever thread makes the reports calls this.
    Any fault of its own is logged and ends the reading. Training continues.

    Args:
        garbage: counts the time in the collector.
        compiling: counts the time of compiling.
        alloc_retries: how often the allocator gave back memory to find some, so far.
        by_cost: whether samples are assigned by cost.
        host: makes what reads the process and its machine.
        now: a monotonic clock in seconds.

    Attributes:
        garbage, compiling: as given.
    """

    def __init__(
        self,
        garbage: SecondsClock,
        compiling: SecondsClock,
        *,
        alloc_retries: Callable[[], int] = lambda: 0,
        by_cost: bool = False,
        host: Callable[..., HostReader] = HostReader,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self.garbage, self.compiling = garbage, compiling
        self._alloc_retries = alloc_retries
        self._by_cost = by_cost
        self._open_host = host
        self._now = now
        self._host: HostReader | None = None
        self._look_s = 0.0
        self._is_on = True
        self._step = -1  # the one under way
        self._gc_s, self._compile_s = garbage.total_s, compiling.total_s  # as last reported
        self._size = self._num_samples = 0  # of the step under way
        self._whole_size = self._whole_number = 0  # of all before it
        self._known: dict[int, StepClues] = {}
        self._looks: deque[HostClues] = deque(maxlen=_MOST_UNTOLD)

    def close(self) -> None:
        """Read no more."""
        self._is_on = False

    def begin_step(self, step: int, gc_s: float, compile_s: float, thread_id: int) -> None:
        """Take in that a step begins, and with it the end of the one before.

        Args:
            step: its number.
            gc_s, compile_s: what both clocks showed then.
            thread_id: the system's number of the thread that trains.
        """
        if self._is_on:
            try:
                self._end_step(gc_s, compile_s)
                self._step = step
                if self._now() >= self._look_s:
                    self._look(thread_id)
            except Exception as error:
                log_fault(self._step, error, _CONTINUES)
                self.close()

    def saw_inputs(self, num_samples: int, size: int) -> None:
        """Take in what a forward of the step was given."""
        self._num_samples += num_samples
        self._size += size

    def reports(self, step: int) -> Sequence[CluesReport | HostReport]:
        """Return what there is to say with the times of ``step``, which is over; once."""
        found: list[CluesReport | HostReport] = []
        while self._looks:
            found.append(HostReport(self._looks.popleft()))
        if (clues := self._known.pop(step, None)) is not None:
            found.append(CluesReport(step, clues))
        return found

    def _end_step(self, gc_s: float, compile_s: float) -> None:
        """Keep what was noticed in the step under way."""
        gc_us = compile_us = 0
        if gc_s + compile_s >= self._gc_s + self._compile_s + _LEAST_S:
            gc_us = round((gc_s - self._gc_s) * 1e6)
            compile_us = round((compile_s - self._compile_s) * 1e6)
            self._gc_s, self._compile_s = gc_s, compile_s
        size, num_samples, self._size, self._num_samples = self._size, self._num_samples, 0, 0
        length = self._length(size, num_samples) if size else 0
        if (gc_us or compile_us or length) and self._step >= 0:
            self._known[self._step] = StepClues(gc_us=gc_us, compile_us=compile_us, size=length)
            if len(self._known) > _MOST_UNTOLD:
                self._known.pop(next(iter(self._known)), None)  # another thread may take it

    def _length(self, size: int, num_samples: int) -> int:
        """Return what the step's inputs have above the mean; 0 where all samples are alike."""
        number = 1 if self._by_cost else num_samples
        self._whole_size += size
        self._whole_number += number
        return size - self._whole_size * number // max(self._whole_number, 1)

    def _look(self, thread_id: int) -> None:
        """Look at the process and its machine; at first only to compare with later."""
        self._look_s = self._now() + _EVERY_S
        if self._host is None:
            self._host = self._open_host(thread_id=thread_id, alloc_retries=self._alloc_retries)
            return
        seen = self._host.read(self._step)
        self._looks.append(
            HostClues(
                seen.step,
                lasted_s=round(seen.lasted_s, 4),
                cpu_s=round(seen.cpu_s, 4),
                throttled_s=round(seen.throttled_s, 4),
                run_delay_s=round(seen.run_delay_s, 4),
                major_faults=seen.major_faults,
                alloc_retries=seen.alloc_retries,
                links=seen.links,
            )
        )
