"""What rank 0 is told of each step: as early as it can be complete."""

from __future__ import annotations

from collections.abc import Sequence

from .._exchange._exchange import Exchange
from .._exchange._internal import fault_in_words, log_fault
from .._exchange._reductions import Reduced
from .._run._machine_reader import MachineReader, NoReader
from .._run._step_under_way import StepUnderWay
from ..planner import Report, blaming
from ._clock import PendingTime
from ._memory._memory import MemoryReader, NoMemory
from ._model._compile_watch import CompileWatch


class Reporter:
    """Sends one message a step, with the measurements that are complete by then.

    Measuring is nothing that training needs: where it fails, rank 0 hears of it, which has all
    ranks go on with equal sizes, and no reader is asked any more.

    Args:
        exchange: carries reports.
        memory: reads peaks.
        machine: reads what the machine has to spare.
        watch: notices what is compiled in a step.
        exact: whether to wait for the device, so that nothing is late.

    Attributes:
        limit: most samples that one forward of this rank may have; None if none failed. It goes
            with every report, because a step that some rank could not time is never complete.
    """

    def __init__(
        self,
        exchange: Exchange,
        memory: MemoryReader,
        machine: MachineReader,
        watch: CompileWatch,
        *,
        exact: bool,
    ) -> None:
        self._exchange = exchange
        self._memory = memory
        self._machine = machine
        self._compiling = watch
        self._exact = exact
        self._pending: list[tuple[StepUnderWay, PendingTime, int]] = []
        self.limit: int | None = None
        self._has_failed = False
        self._fault = ""  # to be told with the next report

    def send(
        self,
        step: StepUnderWay,
        time: PendingTime | None,
        *,
        reduced: Sequence[Reduced] = (),
    ) -> None:
        """Send what is complete of this step, and of earlier ones that a device was late with.

        Args:
            step: the one under way.
            time: its own compute time; None if there is none.
            reduced: what its gradients were made of.
        """
        step.reported = True
        try:
            ready = self._complete(step, time)
        except Exception as error:
            ready = self._without(step, error)
        self._exchange.report(step.number, ready, reduced=reduced)

    def reset_peak(self) -> None:
        """Start a new peak of memory."""
        try:
            with blaming(self._memory):
                self._memory.reset()
        except Exception as error:
            self._give_up(None, error)

    def _complete(self, step: StepUnderWay, time: PendingTime | None) -> list[Report]:
        """Return what is complete."""
        if time is not None and not (self._compiling.stalled or step.again):
            with blaming(self._memory):
                peak_bytes = self._memory.peak_bytes()
            self._pending.append((step, time, peak_bytes))
        ready: list[Report] = []
        while self._pending:
            measured, pending, peak_bytes = self._pending[0]
            compute_s = pending.seconds(block=self._exact)
            if compute_s is None:
                break
            del self._pending[0]
            ready.append(self._make(measured, compute_s, peak_bytes))
        if step.again:
            ready.append(self._make(step, 0.0, 0))
        return ready

    def _without(self, step: StepUnderWay, error: Exception) -> list[Report]:
        """Return what to report of a step whose measuring failed."""
        self._pending.clear()
        self._give_up(step.number, error)
        fault, self._fault = self._fault, ""
        num_samples, total = step.num_samples, step.global_num_samples
        return [Report(step.number, num_samples, total, 0.0, 0.0, fault=fault)]

    def _give_up(self, step: int | None, error: Exception) -> None:
        """Ask no reader any more, and have rank 0 hear why."""
        if not self._has_failed:
            log_fault(
                step, error, "All ranks go on with equal batch sizes for the rest of the run."
            )
            self._has_failed, self._fault = True, fault_in_words(error)
        self._memory, self._machine = NoMemory(), NoReader()

    def _make(self, step: StepUnderWay, compute_s: float, peak_bytes: int) -> Report:
        with blaming(self._machine):
            free_cpu, free_memory_bytes = self._machine.read() or (None, 0)
        with blaming(self._memory):
            capacity_bytes = self._memory.capacity_bytes()
        fault, self._fault = self._fault, ""
        return Report(
            step=step.number,
            batch_size=step.num_samples,
            global_num_samples=step.global_num_samples,
            compute_s=compute_s,
            data_s=step.data_s,
            wall_s=step.wall_s,
            peak_bytes=peak_bytes,
            capacity_bytes=capacity_bytes,
            holds=self._compiling.holds,
            limit=self.limit,
            largest_forward=step.largest,
            again=step.again,
            free_cpu=free_cpu,
            free_memory_bytes=free_memory_bytes,
            fault=fault,
        )
