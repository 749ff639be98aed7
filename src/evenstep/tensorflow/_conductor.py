"""One worker's way through a step: hand-out, weight, own time, report, next plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, Protocol

from .._planner import Plan, Report
from ._machine import MachineReader


class PlanExchange(Protocol):
    """Carries reports and plans."""

    def report(self, report: Report) -> None:
        """Send this worker's one message for a step."""

    def at(self, step: int) -> Plan:
        """Return the plan of ``step``, once it is decided."""

    def enter_collective(self, step: int) -> None:
        """Take notice that gradients of ``step`` are about to be summed over the workers."""

    def leave_collective(self) -> None:
        """Take notice that no more are."""


@dataclass(slots=True)
class StepUnderWay:
    """What is known so far of the step under way.

    Attributes:
        number: of the run, from 0.
        batch_size: samples of this worker.
        global_num_samples: samples of all.
        data_s: seconds that the batch took to be put together.
        wall_s: seconds since the batch before; None for the first of an epoch.
        compute_s: own work so far: mapping of samples, forwards and backwards.
        since_s: when the clock was started; None while it stands.
        num_forwards: so far.
        num_applied: how often gradients were complete so far.
        reported: whether the report is on its way.
    """

    number: int
    batch_size: int
    global_num_samples: int
    data_s: float
    wall_s: float | None
    compute_s: float = 0.0
    since_s: float | None = None
    num_forwards: int = 0
    num_applied: int = 0
    reported: bool = False


class StepConductor:
    r"""Stands between the data set, what is woven into the training graph, and the exchange.

    The clock runs while own samples are mapped, and from the first forward of a step until its
    gradients are complete. It stands while they are summed over the workers. So a wait for others
    is never this worker's own time, and neither is what a training step does before its forward.

    A forward of $n$ samples weighs $n W / N$ in a step of $N$ samples on $W$ workers: then the
    mean over workers of their means is the mean over the global batch.

    The report goes out where optimizers are called as often as in the step before, in the first
    step once for each of them, else at the plan point, late but complete.

    Args:
        exchange: carries reports and plans.
        machine: reads what the machine has to spare.
        world_size: number of workers.
        loss_reduction: ``"mean"`` or ``"sum"``, what the user's loss does over samples.
        first_step: number of the first step, counted over the run.
        num_optimizers: returns how many optimizers are known by now.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        exchange: PlanExchange,
        machine: MachineReader,
        *,
        world_size: int,
        loss_reduction: Literal["mean", "sum"],
        first_step: int = 0,
        num_optimizers: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._exchange = exchange
        self._machine = machine
        self._world_size = world_size
        self._loss_reduction = loss_reduction
        self._clock = clock
        self._step: StepUnderWay | None = None
        self._weight = 1.0
        self._foreseen = num_optimizers  # how often optimizers are called in a step
        self._handed_out_s: float | None = None
        self.num_steps = first_step
        self.plan: Plan | None = None  # of the step under way, or of the last one

    @property
    def is_under_way(self) -> bool:
        """Whether a batch was handed out whose gradients are not yet there."""
        return self._step is not None and not self._step.num_applied

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
        self.plan = self._exchange.at(self.num_steps)
        return self.plan

    def begin_step(self, batch_size: int, *, global_num_samples: int, data_s: float) -> None:
        """Open a step: its batch is about to be handed out."""
        now_s = self._clock()
        wall_s = None if self._handed_out_s is None else now_s - self._handed_out_s
        self._handed_out_s = now_s
        self._step = StepUnderWay(self.num_steps, batch_size, global_num_samples, data_s, wall_s)
        self._weight = 1.0
        if self._loss_reduction == "mean":
            self._weight = batch_size * self._world_size / global_num_samples

    def begin_forward(self) -> float:
        """Start the clock, and return the weight of this forward; 1 outside of a step."""
        step = self._step
        if step is not None and not step.reported:
            step.num_forwards += 1
        self.begin_work()
        return self._weight

    def begin_work(self) -> None:
        """Start the clock, if it stands: what comes now is this worker's own."""
        step = self._step
        if step is not None and not step.reported and step.since_s is None:
            step.since_s = self._clock()

    def end_work(self) -> None:
        """Stop the clock, if it runs."""
        step = self._step
        if step is not None and step.since_s is not None:
            step.compute_s += self._clock() - step.since_s
            step.since_s = None

    def gradients_done(self) -> None:
        """Stop the clock: what comes next is a wait for the others.

        Raises:
            RuntimeError: the batch is none that was handed out.
        """
        step = self._step
        if step is None:
            raise RuntimeError(
                "The balanced model was trained on a batch that its `Balancer` did not hand out: "
                "train on what `balancer.dataset(...)` returned."
            )
        self.end_work()
        self._exchange.enter_collective(step.number)
        step.num_applied += 1
        if step.num_applied == self._foreseen() and not step.reported:
            self._report(step)

    def end_epoch(self) -> None:
        """Close the last step of an epoch: what follows is not training, and has no weight."""
        self._finish()
        self._exchange.leave_collective()
        self._handed_out_s = None

    def close(self) -> None:
        """Have the last step reported, as if it had been an epoch's last, if it was trained on."""
        if self._step is not None and not self.is_under_way:
            self._finish()

    def _finish(self) -> None:
        step, self._step, self._weight = self._step, None, 1.0
        if step is None:
            return
        if not (step.num_forwards and step.num_applied):
            missing = "model" if step.num_applied else "optimizer"
            raise RuntimeError(
                f"Step {step.number} was handed out and its {missing} did not come by: a batch was "
                f"taken and not trained on, or by what the balancer does not know. Prepare both, "
                f"`balancer.prepare(model, optimizer)`; train on forwards without "
                f"`training=False`; for shapes alone take `dataset.element_spec`; in place of a "
                f"`for` over the data inside of a `tf.function`, call `next(iterator)` there."
            )
        if not step.reported:
            self._report(step)
        self._foreseen = lambda: step.num_applied
        self.num_steps += 1

    def _report(self, step: StepUnderWay) -> None:
        step.reported = True
        free_cpu, free_memory_bytes = self._machine.read()
        self._exchange.report(
            Report(
                step=step.number,
                batch_size=step.batch_size,
                global_num_samples=step.global_num_samples,
                compute_s=step.compute_s,
                data_s=step.data_s,
                wall_s=step.wall_s,
                free_cpu=free_cpu,
                free_memory_bytes=free_memory_bytes,
            )
        )
