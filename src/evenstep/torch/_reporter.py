"""What rank 0 is told of each step: as early as it can be complete."""

from __future__ import annotations

from collections.abc import Sequence

from .._exchange._exchange import Exchange
from .._exchange._reductions import Reduced
from ..control import Report
from ._clock import PendingTime
from ._machine import MachineReader
from ._memory._memory import MemoryReader
from ._model._compile_watch import CompileWatch
from ._under_way import StepUnderWay


class Reporter:
    """Sends one message a step, with the measurements that are complete by then.

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
        if time is not None and not (self._compiling.stalled or step.again):
            self._pending.append((step, time, self._memory.peak_bytes()))
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
        self._exchange.report(step.number, ready, reduced=reduced)

    def _make(self, step: StepUnderWay, compute_s: float, peak_bytes: int) -> Report:
        free_cpu, free_memory_bytes = self._machine.read() or (None, 0)
        return Report(
            step=step.number,
            batch_size=step.num_samples,
            global_num_samples=step.global_num_samples,
            compute_s=compute_s,
            data_s=step.data_s,
            wall_s=step.wall_s,
            peak_bytes=peak_bytes,
            capacity_bytes=self._memory.capacity_bytes(),
            holds=self._compiling.holds,
            limit=self.limit,
            largest_forward=step.largest,
            again=step.again,
            free_cpu=free_cpu,
            free_memory_bytes=free_memory_bytes,
        )
