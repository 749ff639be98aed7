"""Any policy on any cluster that can be split, with any times that can be: always a split."""

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from evenstep import Cluster, StepTimings, policies
from evenstep.policies import Deadband, Every, Fixed

NAMES = ("auto", "dynamic-batching", "equal", "lb-bsp-2020", "lbb")


@dataclass(frozen=True)
class Case:
    """A cluster, and the times of some steps on it, each ``(world_size,)``."""

    cluster: Cluster
    seconds: tuple[tuple[float, ...], ...]


@st.composite
def clusters(draw):
    """Clusters that can be split: the global batch is a split within the bounds, plus a crumb."""
    world_size = draw(st.integers(1, 7))

    def each(least, most):
        return np.array(
            draw(st.lists(st.integers(least, most), min_size=world_size, max_size=world_size))
        )

    granularity = each(1, 8)
    least = each(0, 4) * granularity
    sizes = least + each(0, 12) * granularity
    most = sizes + each(0, 20) * granularity
    total = int(sizes.sum())
    if total == 0:
        least, sizes, most = granularity, granularity, most + granularity
        total = int(sizes.sum())
    capped = draw(st.booleans())
    return Cluster(world_size, total, least, most if capped else None, granularity)


@st.composite
def cases(draw):
    """Clusters with steps of any length, from microseconds to days, and any imbalance."""
    cluster = draw(clusters())
    second = st.floats(1e-6, 1e5, allow_nan=False, allow_infinity=False)
    row = st.tuples(*[second] * cluster.world_size)
    return Case(cluster, tuple(draw(st.lists(row, min_size=1, max_size=6))))


def decisions(policy, case):
    """Yield every decision of a run."""
    decision = policy.init(case.cluster)
    yield decision
    for seconds in case.seconds:
        sizes = decision.batch_size
        timings = StepTimings(sizes, np.array(seconds), np.zeros(len(sizes)))
        decision = policy.update(case.cluster, timings, decision.state)
        yield decision


def check(policy, case):
    """Every decision adds up, keeps the bounds, and is the same when asked again."""
    cluster = case.cluster
    again = decisions(policy, case)
    for decision in decisions(policy, case):
        sizes = decision.batch_size
        assert sizes.dtype.kind == "i"
        assert sizes.sum() == cluster.global_batch_size
        assert (cluster.min_batch_size <= sizes).all()
        assert (sizes <= cluster.max_batch_size).all()
        assert sizes.tolist() == next(again).batch_size.tolist()


@pytest.mark.parametrize("name", NAMES)
@given(case=cases())
def test_every_decision_is_a_split(name, case):
    """Sums and bounds, whatever the times were."""
    check(policies.by_name(name), case)


@pytest.mark.parametrize(
    "wrap",
    [lambda p: Deadband(p, 0.1), lambda p: Every(p, 3)],
    ids=["deadband", "every"],
)
@given(case=cases())
def test_wrappers_keep_it_one(wrap, case):
    """A wrapper changes when and how far sizes move, never that they add up."""
    check(wrap(policies.by_name("auto")), case)


@given(
    case=cases(),
    rank=st.integers(0, 6),
    bad=st.sampled_from([float("nan"), float("inf"), -1.0, 0.0]),
)
def test_times_that_cannot_be_are_refused(case, rank, bad):
    """One impossible time in a step is named by its rank, and never reaches a policy."""
    seconds = np.array(case.seconds[0])
    rank %= len(seconds)
    seconds[rank] = bad
    sizes = np.ones(len(seconds), np.int64)

    with pytest.raises(ValueError, match=rf"on rank {rank}"):
        StepTimings(sizes, seconds, np.zeros(len(seconds)))


@given(cluster=clusters(), over=st.integers(1, 50))
def test_bounds_that_cannot_be_met_are_refused(cluster, over):
    """A global batch past the caps, or below the smallest sizes, says which bound it is."""
    lo, hi = cluster.min_batch_size, cluster.max_batch_size
    with pytest.raises(ValueError, match="at most"):
        Cluster(cluster.world_size, int(hi.sum()) + over, lo, hi, cluster.granularity)
    if lo.sum() > over:
        with pytest.raises(ValueError, match="at least"):
            Cluster(cluster.world_size, int(lo.sum()) - over, lo, hi, cluster.granularity)


@given(cluster=clusters())
def test_fixed_sizes_are_taken_or_refused(cluster):
    """Sizes that are a split stay; one sample more is an error."""
    equal = policies.by_name("equal").init(cluster).batch_size.tolist()

    assert Fixed(tuple(equal)).init(cluster).batch_size.tolist() == equal
    with pytest.raises(ValueError, match="Fixed"):
        Fixed((equal[0] + 1, *equal[1:])).init(cluster)
