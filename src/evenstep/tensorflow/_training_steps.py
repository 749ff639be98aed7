"""One worker's way through a step: hand-out, weight, own time, report, next plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import final

from .._exchange._exchange import Exchange
from .._exchange._internal import ALL_EQUAL, fault_in_words, log_fault
from .._exchange._message_kinds import StepReports
from .._planner import Plan, Report
from .._run._machine_reader import MachineReader, read_by
from .._run._step_under_way import StepUnderWay


@final
class TrainingSteps:
    r"""Stands between the data set, what is woven into the training graph, and the exchange.

    The clock runs while own samples are mapped, and from the first forward of a step until its
    gradients are complete. It stands while they are summed over the workers. So a wait for others
    is never this worker's own time, and neither is what a training step does before its forward.

    A forward of $n$ samples weighs $n W / N$ in a step of $N$ samples on $W$ workers: then the
    mean over workers of their means is the mean over the global batch.

    The report goes out where optimizers are called as often as in the step before, in the first
    step once for each of them, else at the plan point, late but complete.

    Step k always decides k + 1. Messages go over connections of their own, and never through
    TensorFlow's collectives: those have to be issued in the same order everywhere, and name
    no worker when one dies.

    Args:
        world_size: number of workers. Into a model that trains alone nothing is woven: there, a
            batch counts as trained on when the next one is asked for.
        loss_reduction: ``"mean"`` or ``"sum"``, what the user's loss does over samples.
        num_optimizers: returns how many optimizers are known by now.
        clock: seconds that only grow.

    Attributes:
        world_size: as given; ``loss_reduction`` likewise.
        plan: of the step under way, or of the last one; that of all for one worker alone.
        num_steps: finished steps, counted over the run.
        forwarding: name of the model whose forward is being traced; None outside of one.
        is_resting: whether forwards are none of training just now.
    """

    def __init__(
        self,
        world_size: int,
        loss_reduction: str,
        *,
        num_optimizers: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.world_size = world_size
        self.loss_reduction = loss_reduction
        self._clock = clock
        self._exchange: Exchange | None = None
        self._machine: MachineReader | None = None
        self._step: StepUnderWay | None = None
        self._compute_s = 0.0  # own work of the step so far
        self._since_s: float | None = None  # when the clock was started; None while it stands
        self._weight = 1.0
        self._foreseen = num_optimizers  # how often optimizers are called in a step
        self._handed_out_s: float | None = None
        self.plan: Plan | None = None
        self.num_steps = 0
        self.forwarding: str | None = None
        self.is_resting = False

    def begin(
        self, exchange: Exchange, machine: MachineReader | None = None, *, first_step: int = 0
    ) -> None:
        """Begin a run of several workers; one alone has its plan, and no exchange."""
        self._exchange, self._machine, self.num_steps = exchange, machine, first_step

    @property
    def is_under_way(self) -> bool:
        """Whether a batch was handed out whose gradients are not yet there."""
        return self._step is not None and not self._step.num_backwards

    @property
    def num_done(self) -> int:
        """Steps whose gradients are there, counted over the run."""
        return self.num_steps + (self._step is not None and not self.is_under_way)

    @property
    def num_samples(self) -> int:
        """Samples of the step under way over all workers; 0 outside of one."""
        return 0 if self._step is None else self._step.global_num_samples

    def next_plan(self) -> Plan:
        """Finish the step under way and return the plan of the next: the plan point.

        Raises:
            RuntimeError: the batch before was not trained on, or not by what was prepared.
            WorkerLostError: a worker was lost.
        """
        self._finish()
        if self._exchange is not None:
            self.plan = self._exchange.at(self.num_steps)
            self._exchange.losses.check()
        assert self.plan is not None, "the run has begun"
        return self.plan

    def begin_step(self, num_samples: int, *, global_num_samples: int, data_s: float) -> None:
        """Open a step: its batch is about to be handed out."""
        if self._exchange is None:
            self.num_steps += 1
            return
        now_s = self._clock()
        wall_s = None if self._handed_out_s is None else now_s - self._handed_out_s
        self._handed_out_s = now_s
        self._compute_s, self._since_s = 0.0, None
        self._step = StepUnderWay(self.num_steps, num_samples, global_num_samples, data_s, wall_s)
        self._weight = 1.0
        if self.loss_reduction == "mean":
            self._weight = num_samples * self.world_size / global_num_samples

    def begin_forward(self) -> float:
        """Start the clock, and return the weight of this forward; 1 outside of a step."""
        if self._step is not None and not self._step.reported:
            self._step.num_forwards += 1
        self.begin_work()
        return self._weight

    def begin_work(self) -> None:
        """Start the clock, if it stands: what comes now is this worker's own."""
        if self._step is not None and not self._step.reported and self._since_s is None:
            self._since_s = self._clock()

    def end_work(self) -> None:
        """Stop the clock, if it runs."""
        if self._since_s is not None:
            self._compute_s += self._clock() - self._since_s
            self._since_s = None

    def gradients_done(self) -> None:
        """Stop the clock: what comes next is a wait for the others.

        Raises:
            RuntimeError: the batch is none that was handed out.
            WorkerLostError: a worker was lost, or has ended its run before this step.
        """
        step, exchange = self._step, self._exchange
        if step is None or exchange is None:
            raise RuntimeError(
                "The balanced model was trained on a batch that its `Balancer` did not hand out: "
                "train on what `balancer.dataset(...)` returned."
            )
        self.end_work()
        exchange.losses.enter_collective()
        exchange.need_all(step.number)
        step.num_backwards += 1
        if step.num_backwards == self._foreseen() and not step.reported:
            self._report(step, exchange)

    def end_epoch(self) -> None:
        """Close the last step of an epoch: what follows is not training, and has no weight."""
        self._finish()
        self._handed_out_s = None
        if self._exchange is not None:
            self._exchange.losses.leave_collective()

    def close(self) -> None:
        """Have the last step reported, as if it had been an epoch's last, if it was trained on."""
        if not self.is_under_way:
            self._finish()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Have forwards pass for none of training in the block: an evaluation is traced."""
        before, self.is_resting = self.is_resting, True
        try:
            yield
        finally:
            self.is_resting = before

    def _finish(self) -> None:
        step, self._step, self._weight = self._step, None, 1.0
        if step is None or self._exchange is None:
            return
        if not (step.num_forwards and step.num_backwards):
            missing = "model" if step.num_backwards else "optimizer"
            raise RuntimeError(
                f"The batch of step {step.number} was handed out, and the balancer saw no call of "
                f"its {missing}. Prepare both, `balancer.prepare(model, optimizer)`, and train on "
                f"every batch, without `training=False`. If you only need shapes, use "
                f"`dataset.element_spec`. In a `tf.function`, call `next(iterator)` instead of a "
                f"`for` over the data."
            )
        if not step.reported:
            self._report(step, self._exchange)
        self._foreseen = lambda: step.num_backwards
        self.num_steps += 1

    def _report(self, step: StepUnderWay, exchange: Exchange) -> None:
        step.reported = True
        free, fault = self._free()
        free_cpu, free_memory_bytes = free or (None, 0)
        report = Report(
            step=step.number,
            batch_size=step.num_samples,
            global_num_samples=step.global_num_samples,
            compute_s=self._compute_s,
            data_s=step.data_s,
            wall_s=step.wall_s,
            free_cpu=free_cpu,
            free_memory_bytes=free_memory_bytes,
            fault=fault,
        )
        messages = (StepReports(step.number, (report,)),)
        exchange.report(step.number, lambda: messages)

    def _free(self) -> tuple[tuple[float, int] | None, str]:
        """Return what the machine has to spare; once, why it cannot be read, and never again."""
        if self._machine is None:
            return None, ""
        try:
            return read_by(self._machine), ""
        except Exception as error:
            self._machine = None
            log_fault(self.num_steps, error, ALL_EQUAL)
            return None, fault_in_words(error)
