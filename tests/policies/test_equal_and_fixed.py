"""Policies that do not react or wrap another, and who gives samples to whom."""

import numpy as np
import pytest

from evenstep import Cluster, apportion
from evenstep.policies import Auto, Deadband, DynamicBatching, Equal, Every, Fixed
from evenstep.policies._base import equal_split, is_feasible, refit, with_floor
from evenstep.policies.papers._moves import find_pair, moved, overshoots, see, spread

from .simulated import follow, measured, sizes_of


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
    with pytest.raises(ValueError, match=r"`Fixed\(batch_size=...\)` must be integers of"):
        Fixed(sizes)


@pytest.mark.parametrize("total", [8, 9, 63, 64, 65, 1000])
def test_the_quick_way_to_the_equal_split_is_the_same(total):
    """Without bounds in the way it is what the general rule gives, ties to the lower rank."""
    cluster = Cluster(8, total)

    assert equal_split(cluster).tolist() == apportion(np.ones(8), cluster).tolist()


PAIR = Cluster(2, 96)
SLOPES_S = [np.array([0.01, 0.02])] * 10


@pytest.mark.parametrize(("threshold", "sizes"), [(0.3, [64, 32]), (0.4, [48, 48])])
def test_a_deadband_holds_what_changes_less(threshold, sizes):
    """From 48 to 32 is a third."""
    decision = follow(Deadband(Auto(), threshold), PAIR, 0.0, SLOPES_S)[-1]

    assert decision.batch_size.tolist() == sizes


def test_a_deadband_adopts_all_sizes_or_none():
    """One worker's change of 10 % is past the band, and carries along seven of 1 %."""
    slope_s = np.full(8, 1e-3)
    slope_s[0] *= 1.12
    policy = Deadband(DynamicBatching(dead_band=0.0), 0.05)

    sizes = follow(policy, Cluster(8, 800), 0.0, [slope_s] * 3)[-1].batch_size

    assert sizes[0] <= 91
    assert (sizes[1:] > 100).all()


def test_every_adopts_at_its_own_pace():
    """The first change comes with the fourth step, though it was known after the first."""
    decisions = follow(Every(Auto(), 4), PAIR, 0.0, SLOPES_S)
    sizes = sizes_of(decisions)

    assert (sizes[:4] == 48).all()
    assert (sizes[4:] == [64, 32]).all()
    assert decisions[5].reason == "held: step 1 of 4"


def test_wrappers_nest():
    """Each adds one thing to what it is given."""
    policy = Deadband(Every(DynamicBatching(), 2), 0.1)

    decision = follow(policy, PAIR, 0.0, SLOPES_S)[-1]

    assert decision.batch_size.tolist() == [64, 32]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Deadband(Equal(), -0.1), r"`Deadband\(threshold=...\)` must be at least 0"),
        (lambda: Every(Equal(), 0), r"`Every\(num_steps=...\)` must be at least 1, got 0\. Use 1"),
    ],
)
def test_settings_out_of_range_are_named(build, message):
    """The message gives class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=message):
        build()


def test_a_wrapper_passes_on_what_the_inner_policy_refuses():
    """Fixed sizes that do not add up are refused through it as well."""
    with pytest.raises(ValueError, match="add up to 96"):
        Deadband(Fixed((1, 2)), 0.1).init(PAIR)


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


HELD = np.array([60, 36])


def seen(ran, waited=0, cluster=PAIR):
    """Return the state after a step with the sizes ``ran``, and what that says."""
    timings, state = measured(ran, [0.1, 0.1]), {"held": HELD, "waited": waited}
    return see(state, cluster=cluster, timings=timings)


def test_a_step_with_the_sizes_decided_counts():
    """And ends any waiting."""
    state, is_new, is_measured = seen([60, 36], waited=2)

    assert is_measured
    assert state["waited"] == 0
    assert not is_new


def test_steps_reported_late_are_waited_out():
    """Two of them; a third in a row means that somebody keeps those sizes."""
    state, _, is_measured = seen([48, 48], waited=1)
    assert not is_measured
    assert state["waited"] == 2

    state, is_new, is_measured = seen([48, 48], waited=2)

    assert is_measured
    assert is_new
    assert state["held"].tolist() == [48, 48]


def test_the_short_last_step_of_an_epoch_neither_counts_nor_is_waited_for():
    """Its sizes add up to something else."""
    state, _, is_measured = seen([6, 4], waited=2)

    assert not is_measured
    assert state["waited"] == 2
    assert state["held"].tolist() == [60, 36]


def test_sizes_that_no_longer_fit_are_cut():
    """Bounds may tighten during a run."""
    state, is_new, _ = seen([60, 36], cluster=Cluster(2, 96, max_batch_size=50))

    assert is_new
    assert state["held"].tolist() == [50, 46]


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
