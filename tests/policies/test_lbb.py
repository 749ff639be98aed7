"""Facts special to `Lbb`."""

import numpy as np
import pytest

from evenstep import Cluster, allocate
from evenstep.policies import Lbb
from evenstep.timemodels import CubicTime
from tests.timemodels.measured import fit

from .simulated import FOUR_GPUS, follow, measured

FOUR = Cluster(4, 512)


def test_one_rapid_step_balances_the_four_gpus_of_the_paper():
    """392.9 ms become 107 ms or less, and below the dead-band nothing moves any more."""
    decisions = follow(Lbb(), FOUR, 0.0, [FOUR_GPUS] * 10)

    assert (FOUR_GPUS * decisions[0].batch_size).max() == pytest.approx(0.3929)
    assert decisions[1].reason.startswith("rapid")
    assert (FOUR_GPUS * decisions[1].batch_size).max() <= 0.107
    assert all(d.batch_size.tolist() == decisions[1].batch_size.tolist() for d in decisions[2:])


@pytest.mark.parametrize(
    ("slowest_s", "sizes"),
    [
        (1.04, [128, 128, 128, 128]),  # below 0.05: nothing
        (1.10, [129, 128, 128, 127]),  # below 0.3: one sample
        (1.29, [129, 128, 128, 127]),
        (1.50, [141, 139, 139, 93]),  # solved
    ],
)
def test_the_straggler_effect_decides_what_is_done(slowest_s, sizes):
    """Nothing, one sample from the slowest to the fastest, or all at once."""
    policy = Lbb()
    times = measured([128] * 4, [0.99, 1.0, 1.0, slowest_s])

    decision = policy.update(FOUR, times, policy.init(FOUR).state)

    assert decision.batch_size.tolist() == sizes


def test_after_a_rapid_step_only_fine_moves_follow_for_a_while():
    """A worker that turns slow in the observation window loses one sample a step."""
    policy = Lbb(observation_steps=3)
    decisions = follow(policy, FOUR, 0.0, [FOUR_GPUS] + [FOUR_GPUS * [1, 2, 1, 1]] * 4)

    kinds = [decision.reason.split(":")[0] for decision in decisions[1:]]

    assert kinds == ["rapid", "fine", "fine", "fine", "rapid"]


def test_known_fixed_costs_make_the_rapid_step_exact():
    """Without them it would overshoot."""
    intercept_s, slope_s = np.array([0.1, 0.2, 0.1, 0.2]), np.array([1, 1, 2, 8]) * 1e-3

    exact = follow(Lbb(tuple(intercept_s)), FOUR, intercept_s, [slope_s])[-1].batch_size
    blind = follow(Lbb(), FOUR, intercept_s, [slope_s])[-1].batch_size

    def spread(sizes):
        return np.ptp(intercept_s + slope_s * sizes)

    assert spread(exact) < 0.01
    assert spread(blind) > 0.05


def test_a_profile_gives_the_first_split_and_the_fixed_costs():
    """LBB's cubic of every worker; fixed costs that are given count instead of the cubic's."""
    sizes, intercept_s, slope_s = (
        np.array([1, 32, 128, 256, 512]),
        0.1,
        np.array([1, 1, 2, 8]) * 1e-3,
    )
    seconds = list(intercept_s + slope_s[:, np.newaxis] * sizes)
    cubic = fit(CubicTime, [sizes] * 4, seconds)
    decisions = follow(Lbb(profile=cubic), FOUR, intercept_s, [slope_s, slope_s * [1, 4, 1, 1]])
    first, _, rapid = (decision.batch_size for decision in decisions)
    changed_s = intercept_s + slope_s * [1, 4, 1, 1] * rapid

    assert first.tolist() == allocate(cubic, FOUR).tolist()
    assert np.ptp(intercept_s + slope_s * first) < 0.02
    assert decisions[2].reason.startswith("rapid")
    assert np.ptp(changed_s) < 0.02
    given = Lbb((0.0,) * 4, profile=cubic)
    assert (follow(given, FOUR, intercept_s, [slope_s] * 2)[1].state["slope_s"] > slope_s).all()


def test_a_profile_of_other_workers_is_refused():
    """At the start, with the number that would do."""
    cubic = fit(CubicTime, [np.arange(1, 5)] * 2, [np.arange(1.0, 5.0)] * 2)

    with pytest.raises(ValueError, match=r"`Lbb\(profile=...\)` must .* 4 workers, got 2"):
        Lbb(profile=cubic).init(FOUR)


def test_a_fixed_cost_above_the_time_leaves_a_positive_slope():
    """A step faster than its profiled fixed cost means the profile is wrong, not the step."""
    policy = Lbb(intercept_s=(0.5, 0.5, 0.5, 0.5))
    timings = measured([128] * 4, [0.1, 0.1, 0.1, 0.4])

    decision = policy.update(FOUR, timings, policy.init(FOUR).state)

    assert decision.batch_size.sum() == 512
    assert (decision.state["slope_s"] > 0).all()


def test_a_worker_that_costs_more_than_it_brings_is_dropped_where_zero_is_allowed():
    """Its fixed cost alone is past the time of the others without it."""
    cluster = Cluster(3, 90, min_batch_size=0)
    intercept_s, slope_s = np.array([0.0, 0.0, 2.0]), np.array([0.01, 0.01, 0.01])

    decision = follow(Lbb((0.0, 0.0, 2.0)), cluster, intercept_s, [slope_s])[-1]

    assert decision.batch_size.tolist() == [45, 45, 0]


@pytest.mark.parametrize(
    "settings",
    [{"fine": 0.5}, {"fine": -0.1}, {"observation_steps": -1}, {"intercept_s": (-1.0,)}],
    ids=str,
)
def test_settings_out_of_range_are_named(settings):
    """The message names class and argument."""
    with pytest.raises(ValueError, match=rf"`Lbb\({next(iter(settings))}=..."):
        Lbb(**settings)


def test_fixed_costs_for_another_cluster_are_refused():
    """At the start, with the number that would do."""
    with pytest.raises(ValueError, match=r"must have 4 entries, one per rank, got 1"):
        Lbb(intercept_s=(0.1,)).init(FOUR)
