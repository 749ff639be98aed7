"""One rank's way through a step: hand-out, weight, own time, report, next plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from ..control import Plan, Report
from ..exceptions import EvenstepWarning
from ._clock import AbstractClock, PendingTime, StepMeter
from ._exchange import Exchange
from ._memory import MemoryReader

# From which expected wait on a rank lets itself be told of the others in Python: past what the
# news takes to travel, and past what a step varies by itself.
_LATE_S = 0.002
_LATE_SHARE = 0.03

_BLIND_STEPS = 5  # a few, as warming-up steps and skipped ones are no mistake


@dataclass(slots=True)
class _Step:
    """What is known of the step under way."""

    number: int
    num_samples: int
    global_num_samples: int
    data_s: float
    wall_s: float | None
    num_forwards: int = 0
    num_backwards: int = 0
    on_last_forward: bool = False
    reported: bool = False


class StepConductor:
    """Stands between the loader, the model's hooks and the exchange.

    The loader announces steps and forwards, and asks for plans; the hooks ask for the weight of
    the forward under way and announce the end of every backward; the exchange is given one
    report a step, as early as it can be complete.

    A step's last backward is recognised by the number of backwards that each forward of the step
    before had: one in most loops. Where that fails, the report goes out at the plan point, late
    but complete.

    Args:
        exchange: carries reports and plans.
        meter: measures own compute time.
        memory: reads peaks.
        world_size: number of workers.
        loss_reduction: ``"mean"`` or ``"sum"``, what the user's loss does over samples.
        settle_s: longest wait for late ranks inside a backward; 0 where collectives do not hold
            up the host, as on CUDA. One that lasts so long was a mistake, and is the last.
        exact: whether to wait for the device at the plan point, so that nothing is late.
    """

    def __init__(
        self,
        exchange: Exchange,
        meter: StepMeter,
        memory: MemoryReader,
        *,
        world_size: int,
        loss_reduction: str,
        settle_s: float,
        exact: bool,
    ) -> None:
        self.meter = meter
        self._exchange = exchange
        self._memory = memory
        self._world_size = world_size
        self._loss_reduction = loss_reduction
        self._settle_s = settle_s
        self._exact = exact
        self._step: _Step | None = None
        self._weight: float | None = None
        self._backwards_per_forward = 0  # 0: not known, or not the same for every forward
        self._may_settle = True
        self._pending: list[tuple[_Step, PendingTime, int]] = []
        self._handed_out_s: float | None = None
        self.num_steps = 0
        self._num_blind = 0  # steps in a row without a backward through a balanced output
        self.plan: Plan | None = None  # of the step under way, or of the last one

    @property
    def clock(self) -> AbstractClock:
        """The clock that the step is measured by."""
        return self.meter.clock

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Have ``listener`` told of every new plan."""
        self._exchange.subscribe(listener)

    def at(self, step: int) -> Plan:
        """Finish the step under way and return the plan of ``step``: the plan point."""
        self._finish()
        self.plan = self._exchange.at(step)
        return self.plan

    @property
    def num_samples(self) -> int | None:
        """Samples of this rank in the step under way; None outside of one."""
        return None if self._step is None else self._step.num_samples

    def begin_step(
        self, step: int, *, num_samples: int, global_num_samples: int, data_s: float
    ) -> None:
        """Open a step: its batch is about to be handed out."""
        now_s = perf_counter()
        wall_s = None if self._handed_out_s is None else now_s - self._handed_out_s
        self._handed_out_s = now_s
        self._step = _Step(step, num_samples, global_num_samples, data_s, wall_s)
        self._memory.reset()

    def begin_forward(self, *, num_samples: int, is_last: bool) -> None:
        """Set the weight of the next forward; the step's clock starts at its first one."""
        step = self._step
        assert step is not None
        if self._loss_reduction == "mean":
            self._weight = num_samples * self._world_size / step.global_num_samples
        else:
            self._weight = 1.0 if num_samples else 0.0
        step.on_last_forward = is_last
        step.num_forwards += 1
        if step.num_forwards == 1:
            self.meter.begin()

    def end_epoch(self) -> None:
        """Close the last step of a loop: what follows is not training, and has no weight."""
        self._finish()
        self._handed_out_s = None

    def weight(self) -> float | None:
        """Return the weight of the forward under way; None outside a step."""
        return self._weight

    def backward_done(self) -> None:
        """Take the time: this rank's own backward is done, the others' may not be."""
        step = self._step
        if step is None:
            return
        self.meter.end()
        step.num_backwards += 1
        foreseen = self._backwards_per_forward * step.num_forwards
        if step.on_last_forward and step.num_backwards == foreseen and not step.reported:
            compute_s = self._report(step)
            if self._settle_s:
                self._settle(step, compute_s)
        if self._settle_s:
            self._exchange.enter_collective()

    def reduced(self) -> None:
        """Note that the collectives of a backward are over."""
        self.meter.waited()
        self._exchange.leave_collective()

    def report_now(self) -> None:
        """Report the step under way if that is still to be done: a collective comes first."""
        if self._step is not None and self._step.num_backwards and not self._step.reported:
            self._report(self._step)

    def _settle(self, step: _Step, compute_s: float | None) -> None:
        """Let a rank that will wait for the others anyway do it where a loss has a name.

        Only where that wait is expected to be long: the news that all are done comes a moment
        after they are, and would hold up those who are in time.
        """
        self._exchange.check()
        slowest_s = self._exchange.slowest_s
        if slowest_s is None or compute_s is None or not self._may_settle:
            return
        if slowest_s - compute_s > max(_LATE_S, _LATE_SHARE * compute_s):
            # Another rank may have had fewer backwards than foreseen, report only at its plan
            # point, and wait for this one in a collective of the user's: once is enough.
            self._may_settle = self._exchange.settle(step.number, limit_s=self._settle_s)

    def _finish(self) -> None:
        step, self._step, self._weight = self._step, None, None
        if step is None:
            return
        if not step.reported:
            self._report(step)
        self._watch(step)
        each, rest = divmod(step.num_backwards, max(step.num_forwards, 1))
        self._backwards_per_forward = 0 if rest else each
        self.num_steps += 1

    def _watch(self, step: _Step) -> None:
        """Warn once if steps go by whose gradient nobody weighted and whose time nobody took."""
        self._num_blind = 0 if step.num_backwards else self._num_blind + 1
        if self._num_blind == _BLIND_STEPS:
            warnings.warn(
                f"No backward came through a balanced model in the last {_BLIND_STEPS} steps, so "
                f"their gradients were not weighted and nothing was measured. Call the model that "
                f"`prepare` returned, or with `weighting='loss'` use `balancer.weight(loss)`.",
                EvenstepWarning,
                stacklevel=2,
            )

    def _report(self, step: _Step) -> float | None:
        """Send what is complete of this step, and of earlier ones that a device was late with.

        Returns:
            The newest compute time, if any is complete.
        """
        step.reported = True
        time = self.meter.take()
        if time is not None:
            self._pending.append((step, time, self._memory.peak_bytes()))
        ready: list[Report] = []
        while self._pending:
            measured, pending, peak_bytes = self._pending[0]
            compute_s = pending.seconds(block=self._exact)
            if compute_s is None:
                break
            del self._pending[0]
            ready.append(self._make_report(measured, compute_s, peak_bytes))
        self._exchange.report(step.number, ready)
        return ready[-1].compute_s if ready else None

    def _make_report(self, step: _Step, compute_s: float, peak_bytes: int) -> Report:
        return Report(
            step=step.number,
            batch_size=step.num_samples,
            global_num_samples=step.global_num_samples,
            compute_s=compute_s,
            data_s=step.data_s,
            wall_s=step.wall_s,
            peak_bytes=peak_bytes,
            capacity_bytes=self._memory.capacity_bytes(),
        )
