"""Facts, as they happened: one frozen value each, plain data, ready for JSON.

Policies return a reason, drivers emit events that carry it, and everything a person sees (the
line in the terminal, the report, the picture of the demo) is drawn from events alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

from msgspec import Meta

SCHEMA_VERSION = 1
"""Grows when a field changes its meaning or goes away; a new field alone leaves it as it is."""

_MOST = 2**53  # integers up to there are exact as floats; no time, size or rate is larger

Whole = Annotated[int, Meta(gt=-_MOST, lt=_MOST)]
"""An ``int``, below 2^53 in size: a reader of a file leaves out an event with a larger one."""
Number = Annotated[float, Meta(gt=-_MOST, lt=_MOST)]
"""A ``float``, finite and below 2^53 in size."""
Count = Annotated[int, Meta(ge=0, lt=_MOST)]
"""An ``int`` of at least 0, below 2^53."""
Amount = Annotated[float, Meta(ge=0, lt=_MOST)]
"""A ``float`` of at least 0, below 2^53."""
Positive = Annotated[int, Meta(ge=1, lt=_MOST)]
"""An ``int`` of at least 1, below 2^53."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """Training began, or began again.

    Attributes:
        world_size: number of workers.
        global_batch_size: samples per optimizer step over all workers.
        num_steps: optimizer steps in one epoch; 0 of a stream that has no length.
        policy: the policy and its settings, as text.
        hosts: host name of every rank.
        devices: device of every rank, such as ``"cpu"`` or ``"cuda:0 NVIDIA H200"``.
        versions: of evenstep, Python and the framework on rank 0, such as ``"torch 2.13.0"``.
    """

    world_size: Positive
    global_batch_size: Positive
    num_steps: Whole
    policy: str
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    versions: tuple[str, ...] = ()

    @property
    def keeps_equal(self) -> bool:
        """Whether the policy is ``Equal``, so that nothing can be saved against equal sizes."""
        return self.policy.startswith("Equal(")


@dataclass(frozen=True, slots=True)
class EstimatesRestored:
    """Estimates of the workers from an earlier run were loaded, before the first step.

    Attributes:
        known: whether the earlier run knew the worker, per rank.
        policy: how the policy starts: ``"resumed"`` with its saved state, if all workers have the
            ranks that they had; ``"rehearsed"`` on the known times of the workers, if they have
            other ranks now; ``"anew"`` if a worker is new or the estimates cannot be used.
        batch_size: local batch sizes to begin with, one per rank.
        problem: why a better one of these ways failed; empty if none did.
    """

    known: tuple[bool, ...]
    policy: str
    batch_size: tuple[Count, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StepMeasured:
    """Every worker's time for one step is known.

    Attributes:
        step: optimizer step, from 0, counted over the whole run.
        plan_epoch: the plan it ran under.
        batch_size: samples computed, one entry per rank.
        compute_s: own forward and backward in seconds, without waiting for others, per rank.
        data_s: waiting for input in seconds, per rank.
        idle_s: waiting for the slowest rank's computing in seconds, per rank.
        makespan_s: ``max(compute_s)``, what the step cost without communication.
        idle_share: summed ``idle_s`` over ``world_size * makespan_s``, in [0, 1).
        equal_split_s: ``makespan_s`` if this step had had the equal split: each worker's time is
            scaled by its fitted curve; None before a fit.
        best_split_s: the same for the best split by the fit.
        wall_s: rank 0's time from the batch before to this one. So it is the whole step before,
            with communication and optimizer; None for the first step of a loop.
        speed_split_s: the same as ``equal_split_s`` for a split by the ranks' speeds alone, by
            count; None unless samples are assigned by cost.
        cost_split_s: the same for assigning by costs alone, as if ranks were equally fast.
        num_steps: number of steps, up to ``step``, of which this is the mean: several short ones
            under ``evenstep watch``. ``wall_s`` is the mean of those of the event before.
    """

    step: Count
    plan_epoch: Whole
    batch_size: tuple[Count, ...]
    compute_s: tuple[Amount, ...]
    data_s: tuple[Amount, ...]
    idle_s: tuple[Amount, ...]
    makespan_s: Number
    idle_share: Number
    equal_split_s: Number | None
    best_split_s: Number | None
    wall_s: Number | None
    speed_split_s: Number | None = None
    cost_split_s: Number | None = None
    num_steps: Positive = 1


@dataclass(frozen=True, slots=True)
class StepsAccounted:
    """Where the time of a step went on every worker, or of several short ones together.

    A step lasts from the hand-out of its batch until the next batch is handed out, or used, if a
    loop fetches ahead. So an evaluation or a checkpoint belongs to the step before it. The last
    step of a run has no such end and is left out. The parts add up to ``wall_s``. On a device they
    are times of the device.

    Attributes:
        step: the newest of the steps, from 0, counted over the whole run.
        num_steps: their number. All times are sums over them.
        wall_s: the whole time in seconds, per rank, as all times below.
        input_s: waiting for the batch, and opening the loader.
        forward_s: own forward and loss, from the hand-out to the backward.
        backward_s: own backward.
        communication_s: the exchange of gradients after the own backward, other collectives that
            evenstep knows, and the exchange of plans, each from when the last rank has come.
        waiting_s: in one of these, until the last rank has come.
        optimizer_s: steps of torch's optimizers.
        evaluation_s: loops over loaders of ``Balancer.prepare_eval``.
        checkpoint_s: ``Checkpoint.save``, waiting for others in it included.
        rest_s: everything else in the loop, and own computing that cannot be separated from
            waiting, as in FSDP2's layers.
    """

    step: Count
    num_steps: Positive
    wall_s: tuple[Amount, ...]
    input_s: tuple[Amount, ...]
    forward_s: tuple[Amount, ...]
    backward_s: tuple[Amount, ...]
    communication_s: tuple[Amount, ...]
    waiting_s: tuple[Amount, ...]
    optimizer_s: tuple[Amount, ...]
    evaluation_s: tuple[Amount, ...]
    checkpoint_s: tuple[Amount, ...]
    rest_s: tuple[Amount, ...]


@dataclass(frozen=True, slots=True)
class WaitingDiagnosed:
    """Which ranks the others wait for, and why; the costliest cause first.

    An exchange that names no link comes before another cause if it costs more than twice as much.

    Attributes:
        step: the newest of the steps that were looked at, from 0.
        num_steps: their number.
        step_s: their mean duration in seconds.
        waiting_share: part of all ranks' time that is waiting for others, in [0, 1].
        explained_share: part of the waiting that the causes explain, in [0, 1].
        causes: such as ``"input"``; empty if too little is explained, or little is lost.
        ranks: the rank of each cause; -1 for a cause without a rank.
        lost_share: part of all ranks' time that each cause costs, in [0, 1]: others wait for it, or
            would wait if no slower rank hid it.
        evidence: what was measured, a line for each cause.
        remedy: what to do, a line for each cause.
        no_verdict: why there is no cause, in words; empty if there is one.
    """

    step: Whole
    num_steps: Whole
    step_s: Number
    waiting_share: Number
    explained_share: Number
    causes: tuple[str, ...]
    ranks: tuple[Whole, ...]
    lost_share: tuple[Number, ...]
    evidence: tuple[str, ...]
    remedy: tuple[str, ...]
    no_verdict: str = ""


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """The batch sizes changed.

    Attributes:
        step: first optimizer step that uses them, from 0.
        plan_epoch: number of the plan.
        batch_size: local batch sizes, one per rank.
        reason: the policy's own words.
        max_forward: most samples of one forward, one per rank, in loops that take micro-batches;
            None is no limit.
    """

    step: Whole
    plan_epoch: Whole
    batch_size: tuple[Count, ...]
    reason: str
    max_forward: tuple[Count, ...] | None = None


@dataclass(frozen=True, slots=True)
class MeasurementRejected:
    """A worker reported an invalid time; the current plan stays.

    Attributes:
        step: optimizer step, from 0.
        rank: the rank that reported it.
        problem: what is wrong with it.
    """

    step: Whole
    rank: Whole
    problem: str


@dataclass(frozen=True, slots=True)
class PolicyFailed:
    """A policy of the user's raised or broke its contract; the last good plan stays.

    Attributes:
        step: optimizer step whose timings it was given, from 0.
        problem: the error, as text.
        policy: its class.
    """

    step: Whole
    problem: str
    policy: str


@dataclass(frozen=True, slots=True)
class BalancingStopped:
    """An optional part failed: all ranks continue with equal batch sizes.

    They do so for the rest of the run, from the same step on; gradients stay exact.

    Attributes:
        step: optimizer step after which it was noticed, from 0.
        rank: where it failed.
        problem: what failed, as text: mostly a mistake of evenstep's own.
        trace: the traceback, as text; empty where it is in the log of another rank.
    """

    step: Whole
    rank: Whole
    problem: str
    trace: str


@dataclass(frozen=True, slots=True)
class PolicySlow:
    """The policy took too long to decide, twice in a row, and is not called for a while.

    Attributes:
        step: optimizer step whose timings it was given, from 0.
        decide_s: seconds of the newest decision, for which all ranks waited. It takes effect.
        rest_s: seconds for which the sizes stay after it.
    """

    step: Whole
    decide_s: Number
    rest_s: Number


@dataclass(frozen=True, slots=True)
class MemoryCapped:
    """What fits into a worker's memory at once became known, or changed.

    Attributes:
        step: optimizer step after which it holds, from 0.
        rank: whose limit it is.
        max_batch_size: largest local batch that fits by the model of its memory, in ``unit``; in
            loops over micro-batches, the largest forward.
        capacity_bytes: memory the device offers.
        unit: ``"samples"``; or, if samples are assigned by cost, ``"size"``, which
            ``Cost(max_size=...)`` counts, such as tokens.
    """

    step: Whole
    rank: Whole
    max_batch_size: Whole
    capacity_bytes: Whole
    unit: str = "samples"


@dataclass(frozen=True, slots=True)
class SizesHeld:
    """The batch sizes stay as they are, and training continues with them.

    Either all workers together cannot hold the global batch, by the model of their memory, so no
    size grows. Or a compiled model is close to torch's limit on the number of its graphs.

    Attributes:
        step: optimizer step after which it was noticed, from 0.
        problem: why, as text.
    """

    step: Whole
    problem: str


@dataclass(frozen=True, slots=True)
class LossNotFinite:
    """Losses are NaN or infinite, and do not recover; once in a run.

    Attributes:
        step: the first optimizer step with such a loss, from 0; in no step since were all finite.
        ranks: the ranks with such a loss in that step.
    """

    step: Whole
    ranks: tuple[Whole, ...]


@dataclass(frozen=True, slots=True)
class ClaimsSwitched:
    """Work stealing begins or ends: ranks may claim a part of every step's samples, or not.

    Attributes:
        step: optimizer step after which it was decided, from 0.
        on: whether ranks claim samples from now on.
    """

    step: Whole
    on: bool


@dataclass(frozen=True, slots=True)
class WorkerUnhelpful:
    """A worker costs more than it brings: its fixed costs exceed the others' full step.

    Attributes:
        step: optimizer step after which it was noticed, from 0.
        rank: which worker.
        with_s: seconds of computing of a step under the best split with it.
        without_s: the same with only the workers that help.
    """

    step: Whole
    rank: Whole
    with_s: Number
    without_s: Number


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    """The links were measured, or found to have changed.

    Attributes:
        step: optimizer step after which these figures hold, from 0.
        up_bytes_per_s: what each rank's link carries away, per rank.
        down_bytes_per_s: what it carries to the rank, per rank.
    """

    step: Whole
    up_bytes_per_s: tuple[Amount, ...]
    down_bytes_per_s: tuple[Amount, ...]


@dataclass(frozen=True, slots=True)
class SharesPlanned:
    """The shares of the aggregation change, or plain all-reduce is used from now on.

    Attributes:
        step: first optimizer step that uses them, from 0.
        plan_epoch: number of the plan of shares; plans of batch sizes have their own.
        parts: part of every bucket that each rank sums, one per rank, in units of 1 / 1048576;
            None for plain all-reduce.
        predicted_s: seconds of an exchange by the model; None before links are known.
        plain_s: seconds of plain all-reduce, as last measured; None before.
        reason: why, in words.
    """

    step: Whole
    plan_epoch: Whole
    parts: tuple[Count, ...] | None
    predicted_s: Number | None
    plain_s: Number | None
    reason: str


@dataclass(frozen=True, slots=True)
class ExchangeMeasured:
    """How long the exchange of one step's gradients took, and what was predicted.

    Attributes:
        step: optimizer step, from 0.
        plan_epoch: the plan of shares it ran under.
        exchange_s: seconds from when all ranks could begin until the last had all sums.
        predicted_s: seconds of the plan by the model, on the links as estimated after this
            exchange; None before links are known.
    """

    step: Whole
    plan_epoch: Whole
    exchange_s: Number
    predicted_s: Number | None


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died, or was silent past the deadline.

    Attributes:
        step: last step that was complete on all ranks; -1 if none was.
        rank: the worker that was lost.
        host: where it ran.
        problem: how it was noticed.
    """

    step: Whole
    rank: Whole
    host: str
    problem: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The balancer was closed.

    Attributes:
        num_steps: optimizer steps done in this run.
    """

    num_steps: Whole


Event = (
    RunStarted
    | EstimatesRestored
    | StepMeasured
    | StepsAccounted
    | WaitingDiagnosed
    | Rebalanced
    | MeasurementRejected
    | PolicyFailed
    | BalancingStopped
    | PolicySlow
    | MemoryCapped
    | SizesHeld
    | LossNotFinite
    | ClaimsSwitched
    | LinksMeasured
    | SharesPlanned
    | ExchangeMeasured
    | WorkerUnhelpful
    | WorkerLost
    | RunEnded
)
Hook = Callable[[Event], None]
"""Called with every event, on rank 0, in a thread of its own.

Training does not wait for it: events for a slow one are dropped, one that raises gets no more.
"""


def to_record(event: Event) -> dict[str, Any]:
    """Return ``event`` as a flat dict with its name under ``"event"``, ready for JSON."""
    record = {field.name: getattr(event, field.name) for field in fields(event)}
    return {"event": type(event).__name__, **record}
