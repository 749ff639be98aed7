"""Exchanges over simulated links: what they add to a step, and how planners follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from ..._planner import Planner
from ..._types import Cluster, FloatArray, IntArray, StepTimings, check_fields, check_range
from ...events import Event
from ...exceptions import invalid
from ...policies import AbstractPolicy, by_name
from ...sim._deciders import job_of
from ...sim._workload import AbstractWorkload
from .._following._link_tracker import ObservedExchange, Transfers
from .._following._share_planner import SharePlanner, SharesInForce
from .._plans._aggregation import Aggregation, Links
from .._plans._duration import exchange_s, fair_transfers, ring_s
from .._plans._optimum import equal_shares
from .._plans._share_plan import plan_shares
from .._plans._share_policies import AbstractSharePolicy


@dataclass(frozen=True, slots=True, eq=False)
class FollowReport:
    """What became of a run over links that change.

    Attributes:
        exchange_s: seconds of every step's exchange, ``(num_steps,)``.
        plans: the plan that each step ran under.
        events: all that the planner reported, in order.
    """

    exchange_s: FloatArray
    plans: tuple[SharesInForce, ...]
    events: tuple[Event, ...]


def play_exchange(
    aggregation: Aggregation,
    links: Links,
    shares: FloatArray | None,
    *,
    plan_epoch: int = 0,
    noise: float = 0.0,
    generator: np.random.Generator | None = None,
) -> ObservedExchange:
    r"""Return one exchange as it goes over links that transfers share fairly.

    Chunks go in lock-step: a push alone, then each push with the pull of the chunk before, then a
    pull alone, every transfer of a round beginning at once (``fair_transfers``). Rounds differ
    from the closed forms in that links are not full to the last moment: 1 to 3 % longer.

    Args:
        aggregation: what is summed; with no limit to the chunks, one round has everything.
        links: what they carry in this very step.
        shares: who sums how much; None for plain all-reduce, a ring by its formula.
        plan_epoch: number of the plan that it runs under.
        noise: standard deviation of the logarithm of the times as they are measured.
        generator: where that comes from; needed if there is any.

    Raises:
        ValueError: there is noise and no generator, or the links are of other ranks.
    """
    if noise and generator is None:
        remedy = "Give `np.random.default_rng(0)`."
        raise invalid("play_exchange(generator=...)", "be given with noise", generator, remedy)
    if shares is None:
        return ObservedExchange(plan_epoch, ring_s(aggregation, links))
    push = np.outer(aggregation.is_worker, np.where(aggregation.is_server, shares, 0.0))
    push = push * aggregation.num_bytes
    np.fill_diagonal(push, 0.0)
    chunks = aggregation.num_chunks
    rounds = [(push + push.T, 1.0)]
    if chunks is not None:
        part = 1 / chunks
        rounds = [(push * part, 1), ((push + push.T) * part, chunks - 1), (push.T * part, 1)]
    exchange_s, seconds, busy_s = 0.0, np.zeros(push.shape), np.zeros((2, len(push)))
    for num_bytes, times in rounds:
        taken_s = fair_transfers(num_bytes, links).seconds
        exchange_s += times * (float(taken_s.max()) + links.latency_s)
        seconds += times * taken_s
        busy_s += times * np.stack([taken_s.max(axis=1), taken_s.max(axis=0)])
    if generator is not None:
        seconds = seconds * np.exp(generator.normal(0, noise, seconds.shape))
        busy_s = busy_s * np.exp(generator.normal(0, noise, busy_s.shape))
    return ObservedExchange(plan_epoch, exchange_s, Transfers(push + push.T, seconds, busy_s))


def follow_links(
    policy: AbstractSharePolicy[Any],
    aggregation: Aggregation,
    links: Sequence[Links],
    *,
    noise: float = 0.0,
    seed: int = 0,
    planner: SharePlanner | None = None,
) -> FollowReport:
    """Return what a policy makes of links that change, by the planner that trains.

    Step k decides k + 1. Deterministic: the same arguments give the same report.

    Args:
        policy: decides the shares.
        aggregation: what is summed in each step.
        links: what they carry in each step.
        noise: as for ``play_exchange``, of the measured times.
        seed: of the noise.
        planner: with other settings than the defaults, and in place of ``policy``.

    Raises:
        ValueError: the links are of other ranks.
    """
    generator = np.random.default_rng(seed)
    planner = planner or SharePlanner(policy, aggregation)
    exchange_s: list[float] = []
    plans: list[SharesInForce] = []
    events: list[Event] = []
    for step, now in enumerate(links):
        plan = planner.plan
        done = play_exchange(
            aggregation,
            now,
            plan.shares if plan.is_shared(step - plan.first_step) else None,
            plan_epoch=plan.epoch,
            noise=noise,
            generator=generator,
        )
        exchange_s.append(done.exchange_s)
        plans.append(plan)
        events += planner.observe(step, done, next_step=step + 1).events
    return FollowReport(np.array(exchange_s), tuple(plans), tuple(events))


def known_links(
    policy: AbstractSharePolicy[Any], aggregation: Aggregation, links: Sequence[Links]
) -> FloatArray:
    """Return the seconds of each exchange if the policy knew every step's links beforehand.

    It uses plain all-reduce where that is no slower, ``(num_steps,)``.
    """
    seconds: list[float] = []
    state, before = policy.init(aggregation).state, None
    for now in links:
        if now is before:
            seconds.append(seconds[-1])
            continue
        before = now
        decision = policy.update(aggregation, now, state)
        state = decision.state
        plan = plan_shares(aggregation, now, shares=decision.shares, margin=0.0)
        shares = None if plan.falls_back else decision.shares
        seconds.append(play_exchange(aggregation, now, shares).exchange_s)
    return np.array(seconds)


@dataclass(frozen=True, slots=True, eq=False)
class OverLinksReport:
    """What became of a run that computed and exchanged.

    Attributes:
        step_s: seconds of every step, ``(num_steps,)``.
        batch_size: local batch sizes, ``(num_steps, world_size)``.
        plans: the plan of shares that each step ran under.
        events: all that the planners reported, in order.
    """

    step_s: FloatArray
    batch_size: IntArray
    plans: tuple[SharesInForce, ...]
    events: tuple[Event, ...]


def run_over_links(
    policy: str | AbstractPolicy[Any],
    cluster: Cluster,
    workload: AbstractWorkload,
    links: Sequence[Links],
    shares: SharePlanner,
    *,
    overlap: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> OverLinksReport:
    """Return what policies of sizes and of shares make of workers and links, side by side.

    The objects are those that train: ``Planner`` and ``SharePlanner``. A step lasts as
    ``SharedLinksComm`` has it, links are measured as in ``play_exchange``, and step k decides
    k + 1 of both. Deterministic: the same arguments give the same report, if the planners are new.

    Args:
        policy: of batch sizes, by name or by value.
        cluster: global batch and bounds.
        workload: what computing takes; all workers take part in all steps.
        links: what they carry in each step.
        shares: plans the shares; not used before.
        overlap: part of computing, at its end, during which gradients become ready, in [0, 1].
        noise: as for ``play_exchange``.
        seed: of the noise.

    Raises:
        ValueError: the numbers of workers or steps differ.
    """
    _check(cluster, workload, links, shares)
    given = by_name(policy) if isinstance(policy, str) else policy
    sizes, generator = Planner(given, job_of(cluster), warm_up_steps=0), np.random.default_rng(seed)
    aggregation = shares.aggregation
    log: list[tuple[float, IntArray, SharesInForce]] = []
    events: list[Event] = []
    for step, now in enumerate(links):
        plan = shares.plan
        batch_size = np.array(sizes.plan.batch_size, np.int64)
        compute_s = workload.seconds(step, batch_size)
        split = plan.shares if plan.is_shared(step - plan.first_step) else None
        step_s = SharedLinksComm(aggregation, now, split, overlap)(compute_s)
        done = play_exchange(
            aggregation, now, split, plan_epoch=plan.epoch, noise=noise, generator=generator
        )
        done = replace(done, exchange_s=max(step_s - float(compute_s.max()), 1e-9))
        log.append((step_s, batch_size, plan))
        events += shares.observe(step, done, next_step=step + 1).events
        timings = StepTimings(batch_size, compute_s, np.zeros(len(batch_size)))
        events += sizes.observe_timings(step, timings, next_step=step + 1)
    seconds, batches, plans = zip(*log, strict=True)
    return OverLinksReport(np.array(seconds), np.array(batches), plans, tuple(events))


def _check(
    cluster: Cluster, workload: AbstractWorkload, links: Sequence[Links], shares: SharePlanner
) -> None:
    sizes = cluster.world_size, workload.world_size, shares.aggregation.num_workers
    if len(set(sizes)) > 1:
        rule, remedy = "have as many workers as the times and the aggregation", "Give one of each."
        raise invalid("run_over_links(cluster=...)", rule, sizes, remedy)
    if not 1 <= len(links) <= workload.num_steps:
        rule = f"be of 1 to {workload.num_steps} steps, as the workload is"
        raise invalid("run_over_links(links=...)", rule, len(links), "Repeat them per step.")


MANY = 64  # chunks that stand for their limit
REMEDY = "0 exchanges at the end, 2/3 during the backward."


@final
@dataclass(frozen=True, slots=True, eq=False)
class SharedLinksComm:
    r"""Gradients are pushed, summed and pulled over links of different speeds.

    A step ends as ``timeline_s`` has it: who is done early pushes early. Without
    shares it is a plain all-reduce that begins when the slowest is done,
    $\max(t, (1 - h) t + R)$ of a ring that takes $R$ and gradients that are ready over the
    last part $h$ of computing, and at least a chunk's part of $R$ after it.

    Args:
        aggregation: what is summed, by whom, in how many chunks; the simulated workers are its
            ranks, those that only serve included.
        links: what they carry.
        shares: part of the bytes that each rank sums, ``(world_size,)``; None for plain all-reduce.
        overlap: part of computing, at its end, during which gradients become ready, in [0, 1].

    Raises:
        ValueError: an argument is out of range, or they speak of other ranks.
    """

    aggregation: Aggregation
    links: Links
    shares: FloatArray | None = None
    overlap: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, overlap=("in [0, 1]", REMEDY))
        shares = equal_shares(self.aggregation) if self.shares is None else self.shares
        exchange_s(self.aggregation, self.links, shares=shares)  # refuses those of other ranks

    def __call__(self, compute_s: FloatArray) -> float:
        """Return the seconds of a step, by when each worker ends computing, ``(world_size,)``."""
        if self.shares is not None:
            return timeline_s(
                compute_s, self.aggregation, self.links, shares=self.shares, overlap=self.overlap
            )
        slowest = float(compute_s[self.aggregation.is_worker].max())
        ring = ring_s(self.aggregation, self.links)
        last = ring / (self.aggregation.num_chunks or MANY)
        return max((1 - self.overlap) * slowest + ring, slowest + last)


def timeline_s(
    compute_s: FloatArray,
    aggregation: Aggregation,
    links: Links,
    *,
    shares: FloatArray,
    overlap: float = 0.0,
) -> float:
    r"""Return the seconds from a common start until all workers have all sums.

    Chunk $k$ of $C$ is ready on worker $i$ at $t_i (1 - h + h (k + 1) / C)$. Every rank has a
    queue up and one down. Up, it pushes chunk $k$ as soon as that is ready and then sends the sums
    of the chunk before, each when all pushes of it are there; down, it gets what others send, no
    sooner than they have sent it. What waits does not keep the link busy. So a worker that is done
    early pushes early, and its sums wait for the last one all the same.

    With all done at once it is between $A$ and the lock-step $T_C$ of ``exchange_s``. Left out:
    that senders share a receiver, which moves single messages but not the sum of a queue.
    Pairs and half duplex are not looked at.

    Args:
        compute_s: seconds of computing, ignored of ranks that only serve, ``(world_size,)``.
        aggregation: what is summed, by whom, in how many chunks.
        links: what each rank's link carries.
        shares: part of the bytes that each rank sums, ``(world_size,)``.
        overlap: $h$, in [0, 1]: 0 if nothing is exchanged before computing ends, about two thirds
            if buckets go while the backward runs.

    Raises:
        ValueError: ``overlap`` is out of range.
    """
    check_range("timeline_s(overlap=...)", overlap, "in [0, 1]", REMEDY)
    works, serves = aggregation.is_worker, shares > 0
    if aggregation.num_workers == 1 and (works & serves).any() and shares[works].sum() > 1 - 1e-9:
        return float(compute_s[works].max())
    chunks = aggregation.num_chunks or MANY
    done_s = np.where(works, compute_s, 0.0)
    part = aggregation.num_bytes / chunks
    gives, takes = works * (1 - shares), aggregation.num_sources * shares
    give_s = gives * part / links.up_bytes_per_s, gives * part / links.down_bytes_per_s
    take_s = takes * part / links.up_bytes_per_s, takes * part / links.down_bytes_per_s
    up, down = np.zeros(len(shares)), np.zeros(len(shares))
    summed, ended = np.zeros(len(shares)), 0.0
    for chunk in range(chunks + 1):
        before = summed
        if chunk < chunks:
            ready = done_s * (1 - overlap + overlap * (chunk + 1) / chunks)
            up, down, sent = _sent(up, down, np.where(works, ready, np.inf), give_s[0], take_s[1])
            summed = np.maximum(np.maximum(down, sent), np.where(works, ready, 0.0))
            summed = summed + links.latency_s
        if chunk:
            up, down, sent = _sent(up, down, np.where(serves, before, np.inf), take_s[0], give_s[1])
            ended = float(np.where(works, np.maximum(down, sent), 0.0).max())
    return max(ended, float(done_s.max())) + links.latency_s


def _sent(
    up: FloatArray, down: FloatArray, ready: FloatArray, up_s: FloatArray, down_s: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return both queues after one more message of all, and when all others' are sent, for each.

    Who has nothing to send is ready at infinity.
    """
    sends = np.isfinite(ready)
    start = np.where(sends, np.maximum(up, ready), np.inf)
    up = np.where(sends, start + up_s, up)
    down = np.where(down_s > 0, np.maximum(down, _least_other(start)) + down_s, down)
    return up, down, _most_other(np.where(sends, up, 0.0))


def _least_other(values: FloatArray) -> FloatArray:
    """Return the least of all others' values, for each."""
    return -_most_other(-values)


def _most_other(values: FloatArray) -> FloatArray:
    """Return the most of all others' values, for each."""
    first = int(np.argmax(values))
    others: FloatArray = np.full(len(values), values[first])
    rest = np.delete(values, first)
    others[first] = rest.max() if len(rest) else -np.inf
    return others
