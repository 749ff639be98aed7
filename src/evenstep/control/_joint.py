"""Batch sizes and shares together: the step that ends first, computing and exchange counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .._minmax import allocate
from .._types import Cluster, FloatArray, IntArray
from ..exceptions import invalid
from ..sharding import Aggregation, Links, equal_shares, optimal_shares, ring_s
from ..timemodels import AffineTime
from ._timeline import timeline_s

PARTS = (0.125, 0.25, 0.5, 0.75, 1.0)  # of a rank's exchange that its batch makes up for
ROUNDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class JointPlan:
    """Who computes how many samples and sums which share, and what a step takes by the model.

    Attributes:
        batch_size: local batch sizes, ``(world_size,)``.
        shares: part of the bytes that each rank sums, ``(world_size,)``.
        extra_s: seconds of each rank's exchange that its batch makes up for: the sizes are those
            that end computing and this together; zeros if nothing is gained, ``(world_size,)``.
        step_s: predicted seconds of a step with both.
        separate_s: with sizes for computing alone and shares for the exchange alone.
        equal_shares_s: with the same sizes and equal shares.
        plain_s: with the same sizes and plain all-reduce once all are done, a ring in rank order.
        gains: whether planning them together is worth it; if not, both are the separate ones.
    """

    batch_size: IntArray
    shares: FloatArray
    extra_s: FloatArray
    step_s: float
    separate_s: float
    equal_shares_s: float
    plain_s: float

    @property
    def gains(self) -> bool:
        return self.step_s < self.separate_s


def plan_jointly(
    times: AffineTime,
    cluster: Cluster,
    aggregation: Aggregation,
    links: Links,
    *,
    shares: FloatArray | None = None,
    overlap: float = 0.0,
    margin: float = 0.01,
) -> JointPlan:
    r"""Return batch sizes and shares with which a step ends first, as far as a search finds them.

    A smaller batch on a slow link's rank makes up for the part of its traffic that nothing hides.
    That is less than it seems: no sum is complete before the slowest worker has pushed, so of its
    exchange only the push can begin early. Behind a common start, with the others ending
    together and a slow link that sets the time, **it brings nothing**.

    Sizes for computing alone (``allocate``) and shares for the exchange alone (``optimal_shares``)
    are the beginning. From there sizes for a given part of every rank's traffic,
    $\min T: \alpha_i + \gamma_i s_i + \lambda V (1 + (N - 2) w_i) / b_i \le T$, and shares for
    given sizes, $w_i = \max(0, ((T - t_i) b_i / V - 1) / (N - 2))$ with $\sum w = 1$, are tried in
    turn, and the solution of ``joint_bound_s``; $\lambda$ is 1/8, 1/4, 1/2, 3/4 and 1. With shares
    that are given, only the sizes. ``timeline_s`` judges all of them; what it does not
    find faster by ``margin`` is not taken. So the answer is never slower than the separate plans by
    this model, and not proven to be the best: on small cases it was within 6 % of all there are.

    Args:
        times: fixed cost and cost per sample; 0 for ranks that only serve.
        cluster: the global batch and bounds; ranks that only serve have a largest size of 0.
        aggregation: what is summed and by whom.
        links: their bandwidths.
        shares: those in force, which are to stay, ``(world_size,)``; None chooses them too.
        overlap: part of computing, at its end, during which gradients become ready, in [0, 1].
        margin: part of the step that joint planning has to save, at least 0.

    Raises:
        ValueError: an argument is out of range, or they speak of other ranks.
    """
    _check(times, cluster, aggregation, margin)

    def judged(sizes: IntArray, each: FloatArray) -> float:
        return timeline_s(times.seconds(sizes), aggregation, links, shares=each, overlap=overlap)

    separate = _Choice(
        allocate(times, cluster),
        optimal_shares(aggregation, links) if shares is None else shares,
        np.zeros(times.world_size),
    )
    separate_s = judged(separate.sizes, separate.shares)
    choices = _choices(times, cluster, aggregation, links, separate, stay=shares is not None)
    best, best_s = _fastest(choices, judged, separate, separate_s)
    if best_s > separate_s * (1 - margin):
        best, best_s = separate, separate_s
    return JointPlan(
        *(best.sizes, best.shares, best.extra_s),
        best_s,
        separate_s,
        judged(best.sizes, equal_shares(aggregation)),
        float(times.seconds(best.sizes).max()) + ring_s(aggregation, links),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """Sizes and shares, and what the sizes make up for."""

    sizes: IntArray
    shares: FloatArray
    extra_s: FloatArray

    @property
    def key(self) -> tuple[bytes, bytes]:
        return self.sizes.tobytes(), self.shares.tobytes()


def _check(times: AffineTime, cluster: Cluster, aggregation: Aggregation, margin: float) -> None:
    if not (np.isfinite(margin) and margin >= 0):
        rule, remedy = "be finite and at least 0", "0.01 is 1 %."
        raise invalid("plan_jointly(margin=...)", rule, margin, remedy)
    if not times.world_size == cluster.world_size == aggregation.world_size:
        got = f"{times.world_size}, {cluster.world_size} and {aggregation.world_size}"
        rule = "speak of the same ranks"
        raise invalid("plan_jointly(times=..., cluster=...)", rule, got, "Give one per rank.")


def _fastest(
    choices: Iterator[_Choice],
    judged: Callable[[IntArray, FloatArray], float],
    first: _Choice,
    first_s: float,
) -> tuple[_Choice, float]:
    """Return the choice that ends first and when, the earlier one of equals; each tried once."""
    best, best_s, tried = first, first_s, {first.key}
    for choice in choices:
        if choice.key not in tried:
            tried.add(choice.key)
            seconds = judged(choice.sizes, choice.shares)
            if seconds < best_s * (1 - 1e-9):
                best, best_s = choice, seconds
    return best, best_s


def _choices(
    times: AffineTime,
    cluster: Cluster,
    aggregation: Aggregation,
    links: Links,
    separate: _Choice,
    *,
    stay: bool,
) -> Iterator[_Choice]:
    """Yield what can be tried, the nearest to the separate plans first."""
    for extra_s, shares in _found(times, cluster, aggregation, links, separate, stay=stay):
        yield _Choice(_sizes_for(times, cluster, extra_s), shares, extra_s)


def _found(
    times: AffineTime,
    cluster: Cluster,
    aggregation: Aggregation,
    links: Links,
    separate: _Choice,
    *,
    stay: bool,
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield what sizes are to make up for, with which shares."""
    if stay:
        for part in PARTS:
            yield part * _traffic_s(aggregation, links, separate.shares), separate.shares
        return
    compute_s = times.seconds(separate.sizes)
    yield separate.extra_s, _shares_for(compute_s, aggregation, links)
    for part in PARTS:
        here = separate.shares
        for _ in range(ROUNDS):
            extra_s = part * _traffic_s(aggregation, links, here)
            yield extra_s, here
            yield extra_s, separate.shares
            moved = _sizes_for(times, cluster, extra_s)
            here = _shares_for(times.seconds(moved), aggregation, links)
            yield extra_s, here
    bound = _bound(times, cluster, aggregation, links)
    if bound is not None:
        yield _traffic_s(aggregation, links, bound), bound


def joint_bound_s(
    times: AffineTime, cluster: Cluster, aggregation: Aggregation, links: Links
) -> float:
    r"""Return a time that no sizes and shares beat, if gradients are ready when computing ends.

    $\min T: \alpha_i + \gamma_i s_i + V (1 + (N - 2) w_i) / b_i \le T, \sum s = S, \sum w = 1$, a
    linear program that has a greedy solution: within a given $T$, a byte more on rank $i$ costs
    $(N - 2) V / (b_i \gamma_i)$ samples there, so shares go to the ranks with the largest $b_i
    \gamma_i$ first. Every rank is looked at alone here; all that one waits for another is left out,
    so what can be had is often far above it.

    Collocated servers only. Samples count as if they could be divided.

    Raises:
        ValueError: a rank is no worker or no server, or they speak of other ranks.
    """
    if not (aggregation.is_worker & aggregation.is_server).all():
        rule, got = "have workers that all serve", "others"
        remedy = "Dedicated servers have no batch: their links alone bound them."
        raise invalid("joint_bound_s(aggregation=...)", rule, got, remedy)
    low, high = 0.0, 1.0
    while not _fits(high, times, cluster, aggregation, links)[0]:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        fits = _fits(middle, times, cluster, aggregation, links)[0]
        low, high = (low, middle) if fits else (middle, high)
    return high


def _bound(
    times: AffineTime, cluster: Cluster, aggregation: Aggregation, links: Links
) -> FloatArray | None:
    """Return the shares of the bound; None where it does not apply."""
    if not (aggregation.is_worker & aggregation.is_server).all() or aggregation.world_size < 3:
        return None
    seconds = joint_bound_s(times, cluster, aggregation, links)
    return _fits(seconds * (1 + 1e-9), times, cluster, aggregation, links)[1]


def _fits(
    seconds: float, times: AffineTime, cluster: Cluster, aggregation: Aggregation, links: Links
) -> tuple[bool, FloatArray]:
    """Say whether all samples fit within a time, and with which shares."""
    size = aggregation.world_size
    own_s = aggregation.num_bytes / links.bandwidth_bytes_per_s
    per_share_s = (size - 2) * own_s
    slope_s = np.maximum(times.slope_s, 1e-15)
    least, most = cluster.min_batch_size, cluster.max_batch_size
    # What is left for the exchange of shares if a rank computes its most, and its least.
    at_least = seconds - own_s - np.where(least > 0, times.intercept_s + slope_s * least, 0.0)
    if (at_least < -1e-12 * seconds).any():
        return False, np.zeros(size)
    if size < 3:
        room = np.clip((seconds - own_s - times.intercept_s) / slope_s, least, most)
        return bool(room.sum() >= cluster.global_batch_size), np.full(size, 1 / size)
    at_most = seconds - own_s - times.intercept_s - slope_s * most
    all_of_it = np.clip(at_least / per_share_s, 0.0, 1.0)
    free = np.clip(at_most / per_share_s, 0.0, 1.0)
    shares = free * min(1.0, 1 / free.sum()) if free.any() else np.zeros(size)
    left = 1 - shares.sum()
    for rank in np.argsort(-slope_s / own_s, kind="stable"):
        more = min(max(left, 0.0), all_of_it[rank] - shares[rank])
        shares[rank] += more
        left -= more
    if left > 1e-9:
        return False, shares
    rest_s = seconds - own_s - per_share_s * shares - times.intercept_s
    samples = np.clip(rest_s / slope_s, least, most)
    return bool(samples.sum() >= cluster.global_batch_size * (1 - 1e-12)), shares / shares.sum()


def _traffic_s(aggregation: Aggregation, links: Links, shares: FloatArray) -> FloatArray:
    """Return how long each rank's link is busy, ``(world_size,)``."""
    works = aggregation.is_worker
    carried = works + (aggregation.num_sources - works) * shares
    answer: FloatArray = aggregation.num_bytes * carried / links.bandwidth_bytes_per_s
    return answer


def _sizes_for(times: AffineTime, cluster: Cluster, extra_s: FloatArray) -> IntArray:
    """Return the sizes with which computing and ``extra_s`` end first."""
    return allocate(AffineTime(times.intercept_s + extra_s, times.slope_s), cluster)


def _shares_for(compute_s: FloatArray, aggregation: Aggregation, links: Links) -> FloatArray:
    """Return the shares that fill what each rank has left when it is done computing."""
    works, serves = aggregation.is_worker, aggregation.is_server
    busy = aggregation.num_sources - works
    if not (busy[serves] > 0).all():
        return equal_shares(aggregation)
    speed = links.bandwidth_bytes_per_s / aggregation.num_bytes

    def room(seconds: float) -> FloatArray:
        left = (seconds - compute_s * works) * speed - works
        return np.where(serves, np.maximum(left, 0.0) / np.maximum(busy, 1), 0.0)

    low, high = 0.0, 1.0
    while room(high).sum() < 1:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if room(middle).sum() >= 1 else (middle, high)
    found = room(high)
    shares: FloatArray = found / found.sum()
    return shares
