"""Facts special to the policies that wrap another."""

import numpy as np
import pytest

from evenstep import Cluster
from evenstep.policies import Auto, Deadband, DynamicBatching, Equal, Every, Fixed, RoundTo

from .simulated import follow, sizes_of

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


def test_round_to_decides_in_multiples():
    """All workers but one hold whole multiples, and the split is the best of those."""
    cluster, slope_s = Cluster(3, 100), np.array([1.0, 2.0, 4.0])

    decision = follow(RoundTo(Auto(), 8), cluster, 0.0, [slope_s] * 5)[-1]

    assert np.count_nonzero(decision.batch_size % 8) <= 1
    assert (slope_s * decision.batch_size).max() == 64.0


def test_round_to_says_where_bounds_leave_no_room():
    """Three workers that hold 33 or 34 samples each have no multiple of 32 adding up to 100."""
    cluster = Cluster(3, 100, min_batch_size=np.array([30, 30, 30]), max_batch_size=40)

    decision = RoundTo(Equal(), 32).init(cluster)

    assert decision.batch_size.tolist() == [34, 33, 33]
    assert "no split in multiples of 32" in decision.reason


def test_round_to_leaves_a_worker_without_room_its_own_granule():
    """Rank 0 holds 5 to 7 samples, so no multiple of 8; the others get theirs."""
    cluster = Cluster(
        3, 100, min_batch_size=np.array([5, 1, 1]), max_batch_size=np.array([7, 100, 100])
    )

    decision = RoundTo(Equal(), 8).init(cluster)

    assert decision.batch_size[0] == 7
    assert np.count_nonzero(decision.batch_size[1:] % 8) <= 1


def test_wrappers_nest():
    """Each adds one thing to what it is given."""
    policy = Deadband(Every(RoundTo(DynamicBatching(), 4), 2), 0.1)

    decision = follow(policy, PAIR, 0.0, SLOPES_S)[-1]

    assert decision.batch_size.tolist() == [64, 32]


def test_a_size_that_numpy_has_worked_out_is_as_good():
    """A granularity may come from an array."""
    cluster = Cluster(3, 100)

    sizes = [RoundTo(Equal(), size).init(cluster).batch_size for size in (8, np.int64(8))]
    assert sizes[0].tolist() == sizes[1].tolist()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Deadband(Equal(), -0.1), r"`Deadband\(threshold=...\)` must be at least 0"),
        (lambda: Every(Equal(), 0), r"`Every\(num_steps=...\)` must be at least 1, got 0\. Use 1"),
        (lambda: RoundTo(Equal(), 0), r"`RoundTo\(granularity=...\)` must be an integer of at"),
        (lambda: RoundTo(Equal(), 8.5), r"must be an integer of at least 1, got 8\.5"),
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
