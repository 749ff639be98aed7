"""Exchanges over simulated links: what they add to a step, and how planners follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..._types import Cluster, FloatArray, check_range
from ...events import Event
from ...exceptions import invalid
from ...policies import AbstractPolicy
from ...sim import SimReport, run
from ...sim._workload import AnyWorkload
from .._following._link_tracker import ObservedExchange, Transfers
from .._following._share_planner import SharePlanner, SharesInForce
from .._plans._aggregation import Aggregation, Links, check_world
from .._plans._duration import check_shares, fair_transfers, ring_s
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
        generator: where that comes from; None is a new one of seed 0.
    """
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
        taken_s, _ = fair_transfers(num_bytes, links)
        exchange_s += times * (float(taken_s.max()) + links.latency_s)
        seconds += times * taken_s
        busy_s += times * np.stack([taken_s.max(axis=1), taken_s.max(axis=0)])
    if noise:
        generator = generator or np.random.default_rng(0)
        seconds = seconds * np.exp(generator.normal(0, noise, seconds.shape))
        busy_s = busy_s * np.exp(generator.normal(0, noise, busy_s.shape))
    return ObservedExchange(plan_epoch, exchange_s, Transfers(push + push.T, seconds, busy_s))


def follow_links(
    planner: SharePlanner, links: Sequence[Links], *, noise: float = 0.0, seed: int = 0
) -> FollowReport:
    """Return what a planner, as it trains, makes of links that change.

    Step k decides k + 1. Deterministic: the same arguments give the same report.

    Args:
        planner: plans the shares; not used before.
        links: what they carry in each step.
        noise: as for ``play_exchange``, of the measured times.
        seed: of the noise.

    Raises:
        ValueError: the links are of other ranks.
    """
    generator = np.random.default_rng(seed)
    exchange_s: list[float] = []
    plans: list[SharesInForce] = []
    events: list[Event] = []
    for step, now in enumerate(links):
        plan = planner.plan
        done = play_exchange(
            planner.aggregation,
            now,
            plan.shares if plan.is_shared(step - plan.first_step) else None,
            plan_epoch=plan.epoch,
            noise=noise,
            generator=generator,
        )
        exchange_s.append(done.exchange_s)
        plans.append(plan)
        events += planner.observe(step, done, next_step=step + 1)
    return FollowReport(np.array(exchange_s), tuple(plans), tuple(events))


def known_links(
    policy: AbstractSharePolicy[Any], aggregation: Aggregation, links: Sequence[Links]
) -> FloatArray:
    """Return the seconds of each exchange if the policy knew every step's links beforehand.

    It uses plain all-reduce where that is no slower, ``(num_steps,)``.
    """
    seconds: list[float] = []
    state, before = policy.init(aggregation), None
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


def run_over_links(
    policy: str | AbstractPolicy[Any],
    cluster: Cluster,
    workload: AnyWorkload,
    links: Sequence[Links],
    shares: SharePlanner,
    *,
    overlap: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> tuple[SimReport, FollowReport]:
    """Return what policies of sizes and of shares make of workers and links, side by side.

    It is ``evenstep.sim.run`` with an exchange that a ``SharePlanner`` plans: the objects are those
    that train. A step lasts as ``step_over_links_s`` has it, links are measured as in
    ``play_exchange``, and step k decides k + 1 of both. Deterministic: the same arguments give the
    same reports, if the planner is new.

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
    aggregation, generator = shares.aggregation, np.random.default_rng(seed)
    if aggregation.world_size != workload.world_size:
        rule = f"aggregate over the {workload.world_size} workers of the times"
        got, remedy = aggregation.world_size, "Give one of each."
        raise invalid("run_over_links(shares=...)", rule, got, remedy)
    if len(links) != workload.num_steps:
        rule = f"be of {workload.num_steps} steps, as the workload is"
        raise invalid("run_over_links(links=...)", rule, len(links), "Repeat them per step.")
    exchange_s: list[float] = []
    plans: list[SharesInForce] = []
    events: list[Event] = []

    def comm(compute_s: FloatArray) -> float:
        step, plan = len(plans), shares.plan
        split = plan.shares if plan.is_shared(step - plan.first_step) else None
        step_s = step_over_links_s(
            compute_s, aggregation, links[step], shares=split, overlap=overlap
        )
        done = play_exchange(
            aggregation, links[step], split, plan_epoch=plan.epoch, noise=noise, generator=generator
        )
        done = replace(done, exchange_s=max(step_s - float(compute_s.max()), 1e-9))
        exchange_s.append(done.exchange_s)
        plans.append(plan)
        events.extend(shares.observe(step, done, next_step=step + 1))
        return step_s

    report = run(policy, cluster, workload, comm=comm)
    return report, FollowReport(np.array(exchange_s), tuple(plans), tuple(events))


MANY = 64  # chunks that stand for their limit


def step_over_links_s(
    compute_s: FloatArray,
    aggregation: Aggregation,
    links: Links,
    *,
    shares: FloatArray | None = None,
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

    Without shares it is a plain all-reduce that begins when the slowest is done,
    $\max(t, (1 - h) t + R)$ of a ring that takes $R$ and gradients that are ready over the
    last part $h$ of computing, and at least a chunk's part of $R$ after it.

    Args:
        compute_s: seconds of computing, ignored of ranks that only serve, ``(world_size,)``.
        aggregation: what is summed, by whom, in how many chunks; the simulated workers are its
            ranks, those that only serve included.
        links: what each rank's link carries.
        shares: part of the bytes that each rank sums, ``(world_size,)``; None for plain all-reduce.
        overlap: $h$, in [0, 1]: 0 if nothing is exchanged before computing ends, about two thirds
            if buckets go while the backward runs.

    Raises:
        ValueError: an argument is out of range, or they speak of other ranks.

    Usage:
        links = {"aggregation": aggregation, "links": links, "shares": shares}
        run(policy, cluster, workload, comm=partial(step_over_links_s, **links))
    """
    remedy = "0 exchanges at the end, 2/3 during the backward."
    check_range("step_over_links_s(overlap=...)", overlap, "in [0, 1]", remedy)
    check_world("step_over_links_s", aggregation, links)
    if np.shape(compute_s) != (aggregation.world_size,):
        rule, remedy = f"have shape ({aggregation.world_size},)", "Give seconds of every rank."
        raise invalid("step_over_links_s(compute_s=...)", rule, np.shape(compute_s), remedy)
    chunks = aggregation.num_chunks or MANY
    if shares is None:
        slowest, ring = float(compute_s[aggregation.is_worker].max()), ring_s(aggregation, links)
        return max((1 - overlap) * slowest + ring, slowest + ring / chunks)
    check_shares("step_over_links_s", aggregation, shares)
    return _by_shares_s(compute_s, aggregation, links, shares, overlap)


def _by_shares_s(
    compute_s: FloatArray,
    aggregation: Aggregation,
    links: Links,
    shares: FloatArray,
    overlap: float,
) -> float:
    """Return the seconds of a step by shares."""
    chunks = aggregation.num_chunks or MANY
    works, serves = aggregation.is_worker, shares > 0
    if aggregation.num_workers == 1 and (works & serves).any() and shares[works].sum() > 1 - 1e-9:
        return float(compute_s[works].max())
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
    down = np.where(down_s > 0, np.maximum(down, -_most_other(-start)) + down_s, down)
    return up, down, _most_other(np.where(sends, up, 0.0))


def _most_other(values: FloatArray) -> FloatArray:
    """Return the most of all others' values, for each."""
    first = int(np.argmax(values))
    others: FloatArray = np.full(len(values), values[first])
    rest = np.delete(values, first)
    others[first] = rest.max() if len(rest) else -np.inf
    return others
