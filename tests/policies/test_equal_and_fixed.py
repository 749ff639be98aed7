"""Facts special to the policies that do not react."""

import numpy as np
import pytest

from evenstep import Cluster, apportion
from evenstep.policies import Equal, Fixed
from evenstep.policies._base import equal_split

from .simulated import measured


def test_equal_gives_the_rest_to_those_with_room():
    """A worker that holds 10 samples at most leaves the others equal shares of what is left."""
    cluster = Cluster(3, 100, max_batch_size=np.array([10, 100, 100]))

    assert Equal().init(cluster).batch_size.tolist() == [10, 45, 45]


def test_fixed_sizes_stay_whatever_is_measured():
    """One worker ten times slower than its share changes nothing."""
    cluster, policy = Cluster(2, 96), Fixed((72, 24))
    first = policy.init(cluster)

    decision = policy.update(cluster, measured([72, 24], [0.1, 1.0]), first.state)

    assert first.batch_size.tolist() == decision.batch_size.tolist() == [72, 24]


def test_fixed_sizes_are_cut_to_bounds_learnt_later():
    """Where memory turns out smaller, the sizes give way, and the reason says so."""
    policy = Fixed([72, 24])
    tight = Cluster(2, 96, max_batch_size=60)

    decision = policy.update(tight, measured([72, 24], [0.1, 0.1]), None)

    assert decision.batch_size.tolist() == [60, 36]
    assert "cut to the bounds" in decision.reason


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((72, 23), r"must add up to 96, .*got \[72, 23\], which add up to 95\. Change"),
        ((95, 1), r"within \[2, 2\] and \[96, 96\]"),
        ((48, 24, 24), r"must have 2 entries, one per rank, got 3 of them"),
    ],
)
def test_fixed_sizes_that_do_not_suit_the_cluster_are_refused(sizes, message):
    """The message holds the sum, the bounds and what would do."""
    with pytest.raises(ValueError, match=message):
        Fixed(sizes).init(Cluster(2, 96, min_batch_size=2))


@pytest.mark.parametrize("sizes", [(1.5, 2.5), (-1, 97), 96, ("a",)])
def test_fixed_sizes_that_are_no_sizes_are_refused(sizes):
    """Before any cluster is known."""
    with pytest.raises(ValueError, match=r"`Fixed\(batch_size=...\)` must be integers >= 0"):
        Fixed(sizes)


@pytest.mark.parametrize("total", [8, 9, 63, 64, 65, 1000])
def test_the_quick_way_to_the_equal_split_is_the_same(total):
    """Without bounds in the way it is what the general rule gives, ties to the lower rank."""
    cluster = Cluster(8, total)

    assert equal_split(cluster).tolist() == apportion(np.ones(8), cluster).tolist()
