"""Who gives samples to whom."""

import numpy as np

from evenstep import Cluster
from evenstep.policies.papers._moves import find_pair, moved, overshoots, spread


def test_the_slowest_gives_to_the_fastest():
    """As much as the fastest has room for and the slowest can spare."""
    cluster = Cluster(3, 96, max_batch_size=np.array([96, 40, 96]))

    pair = find_pair(np.array([32, 32, 32]), np.array([2.0, 1.0, 3.0]), cluster=cluster)

    assert (pair.straggler, pair.leader, pair.room) == (2, 1, 8)
    assert pair.amount(5) == 5
    assert pair.amount(100) == 8
    assert moved(np.array([32, 32, 32]), pair, 5).tolist() == [32, 37, 27]


def test_of_equals_the_lower_rank_gains_and_the_higher_gives():
    """So that ties end with the larger batch at the lower rank."""
    pair = find_pair(np.full(4, 24), np.array([1.0, 2.0, 1.0, 2.0]), cluster=Cluster(4, 96))

    assert (pair.straggler, pair.leader) == (3, 0)


def test_unlike_granules_move_by_their_common_multiple():
    """Or not at all where that is more than there is room for."""
    cluster = Cluster(2, 96, granularity=np.array([4, 6]))

    pair = find_pair(np.array([48, 48]), np.array([2.0, 1.0]), cluster=cluster)

    assert pair.granule == 12
    assert pair.amount(1) == 12
    assert pair.amount(30) == 24


def test_a_move_that_makes_the_fastest_the_slowest_overshoots():
    """Nothing is gained by it, not even where both would swap places."""
    pair = find_pair(np.array([10, 10]), np.array([1.0, 1.2]), cluster=Cluster(2, 20))
    cost_s = np.array([0.1, 0.12])

    assert not overshoots(np.array([1.0, 1.2]), cost_s, pair, 1)
    assert overshoots(np.array([1.0, 1.2]), cost_s, pair, 2)


def test_idle_workers_do_not_count_as_fast():
    """The spread is that of the workers that had samples."""
    assert spread(np.array([1.0, 1.5, 0.0]), np.array([5, 5, 0])) == 0.4
