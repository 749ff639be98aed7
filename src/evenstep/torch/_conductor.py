"""One rank's way through a step: hand-out, weight, own time, report, next plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

from .._exchange._exchange import Exchange
from .._exchange._unit_sums import UnitSum
from ..control import Plan, Report
from ._blind import BlindWatch
from ._clock import PendingTime, StepMeter
from ._exchange._peers import PeerGroup
from ._machine import MachineReader
from ._memory._memory import MemoryReader
from ._model._compile_watch import CompileWatch
from ._model._weighting import Weight
from ._reduce._follower import ShareFollower
from ._under_way import StepUnderWay

# From which expected wait on a rank lets itself be told of the others in Python: past what the
# news takes to travel, and past what a step varies by itself.
_LATE_S = 0.002
_LATE_SHARE = 0.03


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
        machine: reads what the machine has to spare.
        world_size: number of workers.
        loss_reduction: ``"mean"`` or ``"sum"``, what the user's loss does over samples.
        settle_s: longest wait for late ranks inside a backward; 0 where collectives do not hold
            up the host, as on CUDA. After one that lasts so long in vain,
            there are more only if all ranks turn out to have reported before their collectives.
        exact: whether to wait for the device at the plan point, so that nothing is late.
        watch: notices what is compiled in a step.
        meet: does what is collective at the start of a step, such as making the parameters of
            sharded models whole; None where nothing is.
        sharded: whether the collectives of a step begin in its last forward.
        peers: ranks that get the very same batches; None if there are none.
        shares: has the aggregation of gradients follow its plans; None with plain all-reduce.
    """

    def __init__(
        self,
        exchange: Exchange,
        meter: StepMeter,
        memory: MemoryReader,
        machine: MachineReader,
        *,
        world_size: int,
        loss_reduction: str,
        settle_s: float,
        exact: bool,
        watch: CompileWatch,
        meet: Callable[[], None] | None = None,
        sharded: bool = False,
        peers: PeerGroup | None = None,
        shares: ShareFollower | None = None,
    ) -> None:
        self._meet = meet
        self._shares = shares
        self._sharded = sharded
        self._peers = peers
        self._compiling = watch
        self.meter = meter
        self._exchange = exchange
        self._memory = memory
        self._machine = machine
        self._world_size = world_size
        self._loss_reduction = loss_reduction
        self._settle_s = settle_s
        self._exact = exact
        self._step: StepUnderWay | None = None
        self._weight: Weight | None = None
        self._backwards_per_forward = 0  # 0: not known, or not the same for every forward
        self._may_settle = True
        self._in_vain = False  # whether it did in the step under way, and nobody came
        self._pending: list[tuple[StepUnderWay, PendingTime, int]] = []
        self._handed_out_s: float | None = None
        self._limit: int | None = None  # most samples that one forward of this rank may have
        self.num_steps = 0
        self._seen = 0, 0  # samples of this rank: in the finished steps, and in the last of them
        self._blind = BlindWatch()
        self.plan: Plan | None = None  # of the step under way, or of the last one

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Have ``listener`` told of every new plan."""
        self._exchange.subscribe(listener)

    def at(self, step: int) -> Plan:
        """Finish the step under way and return the plan of ``step``: the plan point."""
        self._finish()
        plan = self._exchange.at(step)
        self.plan = plan if self._peers is None else self._peers.agree(plan, self._exchange)
        if self._shares is not None:
            self._shares.at(step)
        if self._in_vain:  # for somebody slow, or for somebody who waited for this rank?
            self._may_settle = self._exchange.all_early
            self._in_vain = False
        return self.plan

    @property
    def num_samples(self) -> int | None:
        """Samples of this rank in the step under way; None outside of one."""
        return None if self._step is None else self._step.num_samples

    @property
    def num_samples_seen(self) -> tuple[int, int]:
        """Samples that this rank trained on: in the run, and in its newest step with a backward."""
        step, (total, newest) = self._step, self._seen
        if step is None or not step.num_backwards:
            return total, newest
        return total + step.num_samples, step.num_samples

    @property
    def num_units(self) -> float | None:
        """Units of this rank in the step under way, samples or others; None outside of one."""
        if self._step is None or self._step.units is None:
            return self.num_samples
        return self._step.units

    def begin_step(
        self,
        step: int,
        *,
        num_samples: int,
        global_num_samples: int,
        data_s: float,
        units: float | None = None,
    ) -> None:
        """Open a step: its batch is about to be handed out."""
        now_s = perf_counter()
        wall_s = None if self._handed_out_s is None else now_s - self._handed_out_s
        self._handed_out_s = now_s
        self._step = StepUnderWay(step, num_samples, global_num_samples, data_s, wall_s)
        self._compiling.begin_step()
        if units is not None:
            self._step.units = units
            self._step.unit_sum = self._exchange.units.add(step, units)
        self._memory.reset()

    def begin_forward(self, *, num_samples: int, is_last: bool, units: float | None = None) -> None:
        """Set the weight of the next forward; the step's clock starts at its first one."""
        step = self._step
        assert step is not None
        if step.unit_sum is not None:
            assert units is not None, "every forward of a step that counts units counts its own"
            self._weight = partial(self._unit_weight, step.unit_sum, units)
        elif self._loss_reduction == "mean":
            self._weight = num_samples * self._world_size / step.global_num_samples
        else:
            self._weight = 1.0 if num_samples else 0.0
        step.on_last_forward = is_last
        step.num_forwards += 1
        self._compiling.begin_forward(num_samples)
        if step.num_forwards == 1:
            self._meet_others()
            self.meter.begin()
        if is_last:
            self.meter.begin_last(done=step.num_done, num_samples=step.num_samples)
            if self._sharded:
                self._exchange.enter_collective()
        step.num_done += num_samples
        step.largest = max(step.largest, num_samples)

    def begin_claim(self) -> None:
        """Stop the clock: this rank asks for more, or waits for samples.

        Not before a device is done with what it was given: one that runs behind would claim all
        there is for work that it has not begun.
        """
        self.meter.pause()

    def end_claim(self, num_samples: int) -> None:
        """Go on with what was claimed; the wait counts as one for input."""
        step = self._step
        assert step is not None
        step.num_samples += num_samples
        step.data_s += self.meter.resume()

    def _meet_others(self) -> None:
        """Do what is collective before the first forward: what follows is this rank's own time."""
        if self._meet is not None:
            self._exchange.enter_collective()
            self._meet()
            self._exchange.leave_collective()

    def found_limit(self, limit: int) -> None:
        """Pass on, with every report from now on, how many samples one forward may have.

        With every one, because a step that some rank could not time is never complete.
        """
        self._limit = limit
        self._memory.reset()  # the peak of what was tried, or failed, is no step's own

    def ran_out_of_memory(self, limit: int, *, num_samples: int, again: bool) -> None:
        """Take a forward back that did not fit, or with ``again`` all of the step so far."""
        self.found_limit(limit)
        step = self._step
        assert step is not None
        step.again = True
        if again:
            step.num_forwards = step.num_backwards = step.num_done = step.largest = 0
        else:
            step.num_forwards -= 1
            step.num_done -= num_samples

    def end_epoch(self) -> None:
        """Close the last step of a loop: what follows is not training, and has no weight."""
        self._finish()
        self._handed_out_s = None

    def weight(self) -> Weight | None:
        """Return the weight of the forward under way, if need be to be asked for in its backward.

        None outside a step.
        """
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
            self._exchange.enter_collective(backward_of=step.number)
        if self._shares is not None:
            self._shares.backward_done()

    def reduced(self) -> None:
        """Note that the collectives of a backward are over."""
        if self._shares is not None:
            self._shares.reduced()
        self.meter.waited()
        self._exchange.leave_collective()

    def report_now(self) -> None:
        """Report the step under way if that is still to be done: a collective comes first."""
        if self._step is not None and self._step.num_backwards and not self._step.reported:
            self._report(self._step, early=False)

    def _unit_weight(self, unit_sum: UnitSum, units: float) -> float:
        """Return the weight of a forward with ``units``, when all ranks have told theirs.

        Called in the backward. A step without a single unit has nothing to learn from: weight 0.
        """
        if unit_sum.total is None:  # others are late: that is no time of this rank's own
            begin = self.meter.clock.mark()
            self._exchange.units.wait(unit_sum)
            self.meter.exclude(begin, self.meter.clock.mark())
        total = unit_sum.total
        return units * self._world_size / total if total else 0.0

    def _settle(self, step: StepUnderWay, compute_s: float | None) -> None:
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
            self._in_vain = not self._exchange.settle(step.number, limit_s=self._settle_s)

    def _finish(self) -> None:
        self._seen = self.num_samples_seen
        step, self._step, self._weight = self._step, None, None
        if step is None:
            return
        self._compiling.end_step()
        if not step.reported:
            self._report(step, early=False)
        if self._shares is not None:
            self._shares.end_step(step.number)
        self._blind.end_step(step.num_backwards)
        each, rest = divmod(step.num_backwards, max(step.num_forwards, 1))
        self._backwards_per_forward = 0 if rest else each
        self.num_steps += 1

    def _report(self, step: StepUnderWay, *, early: bool = True) -> float | None:
        """Send what is complete of this step, and of earlier ones that a device was late with.

        Args:
            step: the one under way.
            early: whether this comes before its last collective.

        Returns:
            The newest compute time, if any is complete.
        """
        step.reported = True
        time = self.meter.take()
        if time is not None and not (self._compiling.stalled or step.again):
            self._pending.append((step, time, self._memory.peak_bytes()))
        ready: list[Report] = []
        while self._pending:
            measured, pending, peak_bytes = self._pending[0]
            compute_s = pending.seconds(block=self._exact)
            if compute_s is None:
                break
            del self._pending[0]
            ready.append(self._make_report(measured, compute_s, peak_bytes))
        if step.again:
            ready.append(self._make_report(step, 0.0, 0))
        self._exchange.report(step.number, ready, early=early)
        return ready[-1].compute_s if ready else None

    def _make_report(self, step: StepUnderWay, compute_s: float, peak_bytes: int) -> Report:
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
            limit=self._limit,
            largest_forward=step.largest,
            again=step.again,
            free_cpu=free_cpu,
            free_memory_bytes=free_memory_bytes,
        )
