"""Which sizes a rule takes to be in force."""

import numpy as np

from evenstep import Cluster
from evenstep.policies._base import equal_split, is_feasible, refit, with_floor
from evenstep.policies.papers._moves import see

from .simulated import measured

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
