"""A simulated run: what happens between two barriers, the workers that do it, and who plans it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._planner import Bounds, Cost, CostPlanner, Job, Plan, Planner, Report, Work, assign
from .._types import Cluster, FloatArray, IntArray, StepTimings
from ..claims import AbstractScheme, Bsp
from ..events import PolicyFailed
from ..exceptions import invalid
from ..policies import AbstractPolicy, Auto, Equal, by_name
from ..solve._allocate import allocate
from ._sample_workload import SampleWorkload
from ._workload import AnyWorkload, BoolArray

BSP = Bsp()
Comm = Callable[[FloatArray], float]


def run(
    policy: str | AbstractPolicy[Any],
    cluster: Cluster,
    workload: AnyWorkload,
    *,
    scheme: AbstractScheme[Any] = BSP,
    comm: Comm | None = None,
    cost: Any = None,
) -> SimReport:
    """Return the report of a simulated run with ``policy``.

    The policy runs in the same ``Planner`` as in training, which shows it the same things and
    treats its mistakes in the same way. Step k decides k + 1. The same arguments give the same
    report.

    With ``cost``, the ``CostPlanner`` of training assigns samples by lengths and speeds, or, under
    the policy ``"equal"``, by lengths alone. Step k then decides k + 2.

    When workers leave or join, the policy starts again with those that are there, as after an
    elastic restart: from its own state if they are the same, from the known times if all were
    measured, otherwise anew. The restart itself takes no time.

    Args:
        policy: by name or by value.
        cluster: global batch, and bounds of all workers of the run.
        workload: the times of computing, and which workers are there.
        scheme: how a plan is carried out; by default as planned.
        comm: a function from the times at which workers end computing, ``(world_size,)``, to the
            seconds of the step. None takes the slowest worker's time, without communication.
        cost: the argument of ``Balancer(cost=...)``, for a ``Scenario.with_lengths``: its
            ``lengths``, or other ones, to see what wrong lengths do. None counts samples.

    Raises:
        ValueError: the numbers of workers differ; the workers of a step cannot hold the global
            batch; the policy breaks its contract; or the cost does not suit the other arguments.
    """
    _check_world(cluster, workload)
    given = by_name(policy) if isinstance(policy, str) else policy
    if cost is not None:
        if not isinstance(workload, SampleWorkload) or scheme is not BSP:
            rule = "come with a workload that has lengths, and without a scheme"
            remedy = "Make one by `Scenario.with_lengths`."
            raise invalid("sim.run(cost=...)", rule, type(workload).__name__, remedy)
        by_cost = CostDecider(given, cluster, workload, cost)
        if not by_cost.is_one_for_all:  # then samples are counted, as in training
            return _report(workload, _play_by_cost(by_cost, workload, comm))
    decider = PolicyDecider(given, cluster)
    return _report(workload, _play(decider.plan, workload, scheme, comm, observe=decider.observe))


def oracle(
    cluster: Cluster,
    workload: AnyWorkload,
    *,
    scheme: AbstractScheme[Any] = BSP,
    comm: Comm | None = None,
) -> FloatArray:
    """Return the step times, ``(num_steps,)``, of the perfect-foresight oracle.

    It knows every step's times beforehand, but not the jitter, which affects it like others. The
    arguments are those of ``run``. A scheme that moves samples inside a step can be faster than
    this plan. The oracle counts samples: if they have lengths it knows their mean, so compare with
    ``lower_bound_s`` of the workload instead.
    """
    _check_world(cluster, workload)

    def foreseen(step: int, members: IntArray) -> tuple[IntArray, str]:
        return allocate(workload.times(step), among(cluster, members, step)), "foreseen"

    return _report(workload, _play(foreseen, workload, scheme, comm)).step_s


Played = tuple[int, IntArray, "Round", str, float]
"""The first step of a round, the workers that are there, what they did, why, and its seconds."""


def _play(
    plan: Callable[[int, IntArray], tuple[IntArray, str]],
    workload: AnyWorkload,
    scheme: AbstractScheme[Any],
    comm: Comm | None,
    *,
    observe: Callable[[int, IntArray, FloatArray], None] | None = None,
) -> Iterator[Played]:
    """Run all rounds, one after the other, by plans of a step for the workers that are there."""
    floor = Floor(workload, scheme)
    step = 0
    while step < workload.num_steps:
        members = workload.members(step)
        sizes, reason = plan(step, members)
        done = floor.round(step, members, sizes)
        round_s = float(done.end_s.max()) if comm is None else comm(done.end_s)
        yield step, members, done, reason, round_s
        step += len(done.batch_size)
        if observe is not None:
            observe(step - 1, done.shown_size, done.shown_s)


def _play_by_cost(
    decider: CostDecider, workload: SampleWorkload, comm: Comm | None
) -> Iterator[Played]:
    """Run all steps with samples assigned one by one."""
    ranks = np.arange(workload.world_size)
    for step in range(workload.num_steps):
        owner, reason = decider.plan(step)
        compute_s = workload.assigned_s(step, owner)
        counts = np.bincount(owner, minlength=len(ranks))
        done = as_planned(compute_s[np.newaxis], counts, np.ones_like(counts))
        step_s = float(compute_s.max()) if comm is None else comm(done.end_s)
        yield step, ranks, done, reason, step_s
        decider.observe(step, owner, compute_s)


def _check_world(cluster: Cluster, workload: AnyWorkload) -> None:
    if cluster.world_size != workload.world_size:
        raise invalid(
            "sim.run(cluster=...)",
            f"have the {workload.world_size} workers of the times",
            cluster.world_size,
            "Give one column of times per worker.",
        )
    if isinstance(workload, SampleWorkload):
        total = workload.global_batch_size
        if cluster.global_batch_size != total:
            rule = f"have the {total} samples of the workload's steps"
            got, remedy = cluster.global_batch_size, "Give both the same."
            raise invalid("sim.run(cluster=...)", rule, got, remedy)


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """What the workers of a round did between two barriers.

    Attributes:
        batch_size: samples computed, ``(num_steps, num_workers)``.
        compute_s: seconds computed for, likewise.
        end_s: when each was done, from the start of the round, ``(num_workers,)``.
        staleness: as in ``SimReport``, ``(num_steps,)``.
        num_moves: claims and hand-overs.
        shown_size: samples of one local step, as a policy is shown them, ``(num_workers,)``.
        shown_s: seconds of one local step, their mean, likewise.
    """

    batch_size: IntArray
    compute_s: FloatArray
    end_s: FloatArray
    staleness: IntArray
    num_moves: int
    shown_size: IntArray
    shown_s: FloatArray


def as_planned(single_s: FloatArray, batch_size: IntArray, local_steps: IntArray) -> Round:
    """Return a round in which every worker computes what was planned, and then waits.

    A worker's local steps are spread evenly over the steps of the round: local step h of n goes
    by the times of step ``h * num_steps // n``.

    Args:
        single_s: what one local step takes, ``(num_steps, num_workers)``.
        batch_size: samples of every local step, ``(num_workers,)``.
        local_steps: steps that each worker takes before all are averaged, likewise.
    """
    num_steps = len(single_s)
    edges = np.arange(num_steps + 1)[:, np.newaxis] * local_steps
    begun = -(-edges // num_steps)  # local steps that have begun by the end of each step
    counts = np.diff(begun, axis=0)
    compute_s: FloatArray = counts * single_s
    end_s: FloatArray = compute_s.sum(axis=0)
    return Round(
        batch_size=counts * batch_size,
        compute_s=compute_s,
        end_s=end_s,
        staleness=begun[1:].max(axis=1) - 1,
        num_moves=0,
        shown_size=batch_size,
        shown_s=end_s / local_steps,
    )


def in_turns(
    scheme: AbstractScheme[Any],
    batch_size: IntArray,
    speeds: FloatArray,
    chunk_s: Callable[[int, int, bool], float],
) -> Round:
    """Return a step in which samples may change hands.

    A rank that is ready takes its turn, the lower one first at the same moment. A rank's speed is
    known as that of its newest chunk, the fixed cost of the step apart.

    Args:
        scheme: says whose turn brings what.
        batch_size: the plan, ``(num_workers,)``.
        speeds: samples per second as known so far, NaN where they are not, updated in place,
            likewise.
        chunk_s: what a rank needs for so many samples, and whether it has computed some before.
    """
    state, num_workers = scheme.begin(batch_size), len(batch_size)
    ran, (compute_s, end_s) = np.zeros(num_workers, np.int64), np.zeros((2, num_workers))
    ready = [(0.0, rank, 0.0) for rank in range(num_workers)]  # when, who, its speed if measured
    ended: set[int] = set()
    num_moves = 0
    while ready:
        now_s, rank, speed = heapq.heappop(ready)
        speeds[rank] = speed or speeds[rank]
        turn = scheme.turn(state, rank, filled(speeds))
        state, chunk = turn.state, turn.chunk
        for other in ended.intersection(turn.woken):
            heapq.heappush(ready, (now_s, other, 0.0))
        ended.difference_update(turn.woken)
        if chunk is None:
            ended.add(rank)
            continue
        seconds = chunk_s(rank, chunk.num_samples, bool(ran[rank]))
        num_moves += chunk.is_moved
        ran[rank] += chunk.num_samples
        compute_s[rank] += seconds
        end_s[rank] = now_s + chunk.cost_s + seconds
        moving_s = chunk_s(rank, chunk.num_samples, True)
        heapq.heappush(ready, (float(end_s[rank]), rank, chunk.num_samples / max(moving_s, 1e-12)))
    return Round(
        batch_size=ran[np.newaxis],
        compute_s=compute_s[np.newaxis],
        end_s=end_s,
        staleness=np.zeros(1, np.int64),
        num_moves=num_moves,
        shown_size=ran,
        shown_s=compute_s,
    )


def filled(speeds: FloatArray) -> FloatArray:
    """Return ``speeds`` with the mean of the known in the place of each NaN; ones if none is."""
    unknown = np.isnan(speeds)
    if not unknown.any():
        return speeds
    return np.where(unknown, 1.0 if unknown.all() else np.nanmean(speeds), speeds)


class Floor:
    """The workers of a run under one scheme, and what they know of each other's speeds.

    Args:
        workload: what computing takes.
        scheme: what becomes of a plan while its step runs.
    """

    def __init__(self, workload: AnyWorkload, scheme: AbstractScheme[Any]) -> None:
        self._workload, self._scheme = workload, scheme
        self._speeds = np.full(workload.world_size, np.nan)  # until they are measured
        self._newest_s = np.full(workload.world_size, np.nan)

    def round(self, step: int, members: IntArray, batch_size: IntArray) -> Round:
        """Return what follows from a plan, up to the next barrier.

        Args:
            step: the first step of the round.
            members: the workers that are there, ascending, ``(num_members,)``.
            batch_size: the plan, likewise; the round's arrays are about these workers too.
        """
        if self._scheme.moves_samples:
            return self._in_turns(step, members, batch_size)
        newest_s = self._newest_s[members]
        is_known = np.isfinite(newest_s).all()
        local_steps = self._scheme.local_steps(newest_s if is_known else np.ones(len(members)))
        steps = self._steps(step, members, int(local_steps.min()))
        # A round that is cut short is so for everybody.
        cut = np.maximum(local_steps * len(steps) // local_steps.min(), 1)
        planned = np.zeros(self._workload.world_size, np.int64)
        planned[members] = batch_size
        seconds = np.array([self._workload.seconds(at, planned)[members] for at in steps])
        done = as_planned(seconds, batch_size, cut)
        self._newest_s[members] = np.where(batch_size > 0, done.shown_s, newest_s)
        return done

    def _in_turns(self, step: int, members: IntArray, batch_size: IntArray) -> Round:
        def chunk_s(rank: int, num_samples: int, again: bool) -> float:
            return self._workload.chunk_s(step, int(members[rank]), num_samples, again=again)

        speeds = self._speeds[members]
        done = in_turns(self._scheme, batch_size, speeds, chunk_s)
        self._speeds[members] = speeds
        return done

    def _steps(self, first: int, members: IntArray, most: int) -> range:
        """Return at most so many steps with the same members."""
        last = min(first + most, self._workload.num_steps)
        for step in range(first + 1, last):
            if not np.array_equal(self._workload.members(step), members):
                return range(first, step)
        return range(first, last)


@dataclass(frozen=True, slots=True, eq=False)
class SimReport:
    """What happened in a simulated run.

    If ranks average parameters only after several steps (local SGD), the seconds of a round are
    spread evenly over its steps, and a step counts all samples that a worker computed in it.

    Attributes:
        step_s: seconds of every step, communication included, ``(num_steps,)``.
        batch_size: samples that each worker computed, ``(num_steps, world_size)``.
        compute_s: seconds that each worker computed, without claims and hand-overs,
            ``(num_steps, world_size)``.
        reasons: the policy's reason for the plan of every step.
        staleness: most local steps that a worker had taken since the last average when it began
            one in this step, ``(num_steps,)``. 0 if gradients are summed in every step.
        num_moves: claims and hand-overs, ``(num_steps,)``.
        presence: which workers took part, ``(num_steps, world_size)``.
        restarts: steps before which workers left or joined.
    """

    step_s: FloatArray
    batch_size: IntArray
    compute_s: FloatArray
    reasons: tuple[str, ...]
    staleness: IntArray
    num_moves: IntArray
    presence: BoolArray
    restarts: tuple[int, ...]

    @property
    def idle_share(self) -> float:
        """Share of the time of the present workers that was not spent computing, in [0, 1)."""
        paid_s = (self.step_s * self.presence.sum(axis=1)).sum()
        return float(1 - self.compute_s.sum() / paid_s)

    @property
    def samples_per_s(self) -> float:
        """Samples of all workers over the time of all steps."""
        return float(self.batch_size.sum() / self.step_s.sum())

    def regret(self, oracle_s: FloatArray) -> float:
        """Return the mean step time divided by that of ``oracle``, minus 1; for equal batches."""
        return float(self.step_s.mean() / oracle_s.mean() - 1)


def _report(workload: AnyWorkload, rounds: Iterable[Played]) -> SimReport:
    """Return what happens in all rounds."""
    shape = (workload.num_steps, workload.world_size)
    step_s, compute_s = np.empty(shape[0]), np.zeros(shape)
    batch_size, presence = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    staleness, num_moves = np.zeros((2, shape[0]), np.int64)
    reasons: list[str] = []
    for step, members, done, reason, round_s in rounds:
        num_steps = len(done.batch_size)
        rows = slice(step, step + num_steps)
        step_s[rows] = round_s / num_steps
        batch_size[rows, members], compute_s[rows, members] = done.batch_size, done.compute_s
        presence[rows, members] = True
        staleness[rows], num_moves[rows] = done.staleness, done.num_moves
        reasons += [reason] * num_steps
    changed = (presence[1:] != presence[:-1]).any(axis=1)
    restarts = tuple((np.flatnonzero(changed) + 1).tolist())
    return SimReport(
        step_s, batch_size, compute_s, tuple(reasons), staleness, num_moves, presence, restarts
    )


class PolicyDecider:
    """A policy, planned for by the ``Planner`` that trains on rank 0.

    When workers leave or join, another planner takes over for those who are there, as after an
    elastic restart: it takes up what the last one has learnt, as far as the workers are the same.

    Args:
        policy: decides.
        cluster: of all workers of the run.
    """

    def __init__(self, policy: AbstractPolicy[Any], cluster: Cluster) -> None:
        self._policy, self._cluster = policy, cluster
        self._members = np.empty(0, np.int64)
        self._planner: Planner | None = None

    def plan(self, step: int, members: IntArray) -> tuple[IntArray, str]:
        """Return the members' batch sizes, ``(num_members,)``, and why they are such."""
        if self._planner is None or not np.array_equal(members, self._members):
            self._planner = self._restarted(step, members)
            self._members = members
        plan = self._planner.plan
        return np.array(plan.batch_size, np.int64), plan.reason

    def observe(self, step: int, batch_size: IntArray, compute_s: FloatArray) -> None:
        """Take in what the members computed in ``step``, both ``(num_members,)``."""
        assert self._planner is not None
        ran_under = self._planner.plan
        timings = StepTimings(batch_size, compute_s, np.zeros(len(batch_size)))
        for event in self._planner.observe_timings(step, timings, next_step=step + 1):
            if isinstance(event, PolicyFailed):
                raise invalid(
                    "sim.run(policy=...)",
                    "keep the contract of policies in every step",
                    f"{type(self._policy).__name__}, which failed in step {step}: {event}",
                    "Run `evenstep.testing.PolicyContract` on it.",
                )
        total = int(batch_size.sum())
        pairs = zip(batch_size.tolist(), compute_s.tolist(), strict=True)
        reports = [Report(step, size, total, seconds, 0.0) for size, seconds in pairs]
        self._planner.account(reports, ran_under)  # what a restart goes by

    def _restarted(self, step: int, members: IntArray) -> Planner:
        job = job_of(among(self._cluster, members, step))
        planner = Planner(self._policy, job, warm_up_steps=0)
        if self._planner is not None:
            place = {int(worker): rank for rank, worker in enumerate(self._members)}
            former = np.array([place.get(int(worker), -1) for worker in members], np.int64)
            planner.restore(self._planner.learnt(), former)
        return planner


def among(cluster: Cluster, members: IntArray, step: int) -> Cluster:
    """Return the cluster of the workers that are there.

    Raises:
        ValueError: their bounds leave no way to split the global batch.
    """
    if len(members) == cluster.world_size:
        return cluster
    try:
        return Cluster(
            len(members),
            cluster.global_batch_size,
            cluster.min_batch_size[members],
            cluster.max_batch_size[members],
            cluster.granularity[members],
        )
    except ValueError as error:
        raise invalid(
            "sim.run(cluster=...)",
            f"leave a way to split among the {len(members)} workers of step {step}",
            str(error),
            "Widen the bounds, or keep more workers.",
        ) from error


def job_of(cluster: Cluster) -> Job:
    """Return what a planner knows of ``cluster``."""

    def each(sizes: IntArray) -> tuple[int, ...]:
        return tuple(sizes.tolist())

    bounds = Bounds(min=each(cluster.min_batch_size), granularity=each(cluster.granularity))
    most = each(cluster.max_batch_size)
    return Job(cluster.world_size, cluster.global_batch_size, bounds=bounds, most=most)


class CostDecider:
    """The ``CostPlanner`` that trains on rank 0, and what every rank makes of its plans.

    It learns from a step while the next one runs, so step k decides k + 2.

    Args:
        policy: as in ``Balancer(cost=...)``: ``Auto``, or ``Equal``, which balances lengths alone.
        cluster: the global batch; with costs there are no bounds.
        workload: whose samples are assigned.
        cost: what ``Balancer(cost=...)`` would be given.

    Attributes:
        is_one_for_all: whether all samples cost the same.

    Raises:
        ValueError: another policy, bounds, or a cost that is not about these samples.
    """

    def __init__(
        self, policy: AbstractPolicy[Any], cluster: Cluster, workload: SampleWorkload, cost: Any
    ) -> None:
        _check(policy, cluster)
        given = Cost.given(cost)
        assert given is not None
        if given.padded is None:
            given = Cost(given.of, workload.padded, given.max_size, given.max_samples)
        if isinstance(given.of, str) or given.is_capped or given.padded != workload.padded:
            rule = "be lengths by index, with no caps, and padded as the workload is"
            remedy = "Give `workload.lengths`."
            raise invalid("sim.run(cost=...)", rule, given, remedy)
        self.is_one_for_all = given.is_one_for_all
        self._workload = workload
        self._costs = given.table(workload.lengths)
        self._planner = CostPlanner(
            Job(cluster.world_size, cluster.global_batch_size),
            self._costs,
            kinds=[0] * cluster.world_size,
            by_speed=not isinstance(policy, Equal),
        )
        self._plans = [self._planner.plan]  # the newest last

    def plan(self, step: int) -> tuple[IntArray, str]:
        """Return the owner of every sample of a step, and why."""
        plan = self._in_force(step)
        ranks = np.arange(self._workload.world_size)
        if plan.costs is None:
            return np.repeat(ranks, plan.batch_size), plan.reason
        found = assign(self._costs, self._features(step), plan.costs.workers())
        return found.owner, plan.reason

    def observe(self, step: int, owner: IntArray, compute_s: FloatArray) -> None:
        """Take in what the ranks computed in ``step``, and for how long, ``(world_size,)``."""
        plan, features = self._in_force(step), self._features(step)
        world_size = self._workload.world_size
        equal = np.array_split(features, world_size)
        counted = np.split(features, np.cumsum(plan.batch_size)[:-1])
        reports = []
        for rank, took_s in enumerate(compute_s.tolist()):
            own = features[owner == rank]
            work = Work(*(self._costs.total([part]) for part in (own, equal[rank], counted[rank])))
            wall_s = float(compute_s.max())
            reports.append(Report(step, len(own), len(owner), took_s, 0.0, wall_s, work=work))
        self._planner.observe(reports, next_step=step + 1)
        self._planner.catch_up(next_step=step + 2)
        if self._planner.plan is not self._plans[-1]:
            self._plans.append(self._planner.plan)

    def _features(self, step: int) -> IntArray:
        return self._costs.features(self._workload.order[step])

    def _in_force(self, step: int) -> Plan:
        return next(plan for plan in reversed(self._plans) if plan.first_step <= step)


def _check(policy: AbstractPolicy[Any], cluster: Cluster) -> None:
    if not isinstance(policy, Auto | Equal):
        raise invalid(
            "sim.run(policy=...)",
            "be 'auto' or 'equal' with a cost",
            type(policy).__name__,
            "Others count samples.",
        )
    free = Cluster(cluster.world_size, cluster.global_batch_size)
    if any(
        not np.array_equal(getattr(cluster, name), getattr(free, name))
        for name in ("min_batch_size", "max_batch_size", "granularity")
    ):
        remedy = "Give `Cluster(world_size, global_batch_size)`."
        raise invalid("sim.run(cluster=...)", "have no bounds with a cost", cluster, remedy)
