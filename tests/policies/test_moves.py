"""Who gives samples to whom, and which sizes a rule takes to be in force."""

import numpy as np

from evenstep import Cluster
from evenstep.policies._base import equal_split, is_feasible, refit, with_floor
from evenstep.policies.papers._moves import find_pair, moved, overshoots, see, spread

from .simulated import measured


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


PAIR = Cluster(2, 96)
HELD = np.array([60, 36])


def seen(ran, waited=0, cluster=PAIR):
    """Return what is in force after a step with the sizes ``ran``."""
    timings = measured(ran, [0.1, 0.1])
    return see(HELD, waited, cluster=cluster, timings=timings)


def test_a_step_with_the_sizes_decided_counts():
    """And ends any waiting."""
    held = seen([60, 36], waited=2)

    assert held.measured
    assert held.waited == 0
    assert not held.is_new


def test_steps_reported_late_are_waited_out():
    """Two of them; a third in a row means that somebody keeps those sizes."""
    assert not seen([48, 48], waited=0).measured
    assert seen([48, 48], waited=1).waited == 2

    kept = seen([48, 48], waited=2)

    assert kept.measured
    assert kept.is_new
    assert kept.batch_size.tolist() == [48, 48]


def test_the_short_last_step_of_an_epoch_neither_counts_nor_is_waited_for():
    """Its sizes add up to something else."""
    tail = seen([6, 4], waited=2)

    assert not tail.measured
    assert tail.waited == 2
    assert tail.batch_size.tolist() == [60, 36]


def test_sizes_that_no_longer_fit_are_cut():
    """Bounds may tighten during a run."""
    held = seen([60, 36], cluster=Cluster(2, 96, max_batch_size=50))

    assert held.is_new
    assert held.batch_size.tolist() == [50, 46]


def test_mending_a_feasible_split_returns_it():
    """The very same object, so that callers can tell."""
    assert refit(HELD, PAIR) is HELD
    assert not is_feasible(np.array([97, -1]), PAIR)
    assert equal_split(PAIR).tolist() == [48, 48]


def test_a_floor_is_one_granule_where_there_is_room():
    """And none where the global batch is too small for it."""
    free = Cluster(2, 96, min_batch_size=0, granularity=8)
    small = Cluster(2, 8, min_batch_size=0, granularity=8)

    assert with_floor(free).min_batch_size.tolist() == [8, 8]
    assert with_floor(small) is small
