"""Facts special to `DynamicBatching`."""

import numpy as np
import pytest

from evenstep import Cluster
from evenstep.policies import DynamicBatching

from .simulated import follow, jitter, largest_change, measured, sizes_of, unlike_workers

TRIO = Cluster(3, 96)


def test_a_fixed_cost_takes_three_rounds():
    """t = 5 + c b with c = (1, 1, 5): within a sample of the optimum, and the sum stays 96."""
    decisions = follow(DynamicBatching(), TRIO, 5.0, np.tile([1.0, 1.0, 5.0], (3, 1)))

    assert abs(decisions[-1].batch_size - [43.6, 43.6, 8.7]).max() <= 1
    assert (sizes_of(decisions).sum(axis=1) == 96).all()


def test_one_straggler_among_many_is_seen():
    """The other 63 grow by 0.8 % each, below the dead-band; the straggler's own change counts."""
    cluster, slope_s = Cluster(64, 6400), np.full(64, 0.001)
    slope_s[7] = 0.0015

    decision = follow(DynamicBatching(), cluster, 0.0, [slope_s])[-1]

    assert decision.batch_size[7] == 67


@pytest.mark.parametrize(("factor", "resized"), [(1.04, False), (1.12, True)])
def test_the_dead_band_ignores_small_changes(factor, resized):
    """4 % slower is nothing, 12 % is, and resizes the others too: all workers, or none.

    Rank 1 is 3 % slower, which changes nothing alone, and is followed where rank 0 is.
    """
    cluster, slope_s = Cluster(8, 8000), np.full(8, 1e-4)
    settled = follow(DynamicBatching(), cluster, 0.0, [slope_s] * 10)[-1]
    slope_s[:2] *= factor, 1.03

    decision = follow(DynamicBatching(), cluster, 0.0, [slope_s] * 200, start=settled)[-1]

    assert (decision.batch_size[0] < 1000) == resized
    assert (decision.batch_size[2:] > 1000).all() == resized
    assert (decision.batch_size[1] < 0.99 * decision.batch_size[2]) == resized


def test_a_resize_forgets_the_times_before_it():
    """Rank 1 is slow in the first step alone: the times of the second alone decide what follows."""
    slopes_s = [np.array([1.0, 3.0]) * 1e-3, np.array([1.0, 1.0]) * 1e-3]

    sizes = sizes_of(follow(DynamicBatching(), Cluster(2, 96), 0.0, slopes_s))

    assert sizes.tolist() == [[48, 48], [72, 24], [48, 48]]


def test_sizes_from_elsewhere_forget_the_times_before_them():
    """A cap moves rank 1 to 24 samples; once it is gone, times at other sizes count no more."""
    policy, slope_s = DynamicBatching(), np.full(2, 1e-3)
    free, tight = Cluster(2, 96), Cluster(2, 96, max_batch_size=np.array([96, 24]))
    decision = follow(policy, free, 0.0, [slope_s] * 10)[-1]

    sizes = sizes_of(follow(policy, tight, 0.0, [slope_s] * 2, start=decision))
    decision = follow(policy, tight, 0.0, [slope_s] * 2, start=decision)[-1]
    after = follow(policy, free, 0.0, [slope_s], start=decision)[-1]

    assert sizes[-1].tolist() == [72, 24]
    assert after.batch_size.tolist() == [48, 48]


@pytest.mark.parametrize("seed", range(3))
def test_jitter_alone_lets_it_settle(seed):
    """With 3 % on every step, nobody's batch changes by more than 5 % once it has settled."""
    intercept_s, slope_s = unlike_workers(seed)
    noise = jitter(0.03, 500, 8, seed)

    decisions = follow(
        DynamicBatching(), Cluster(8, 512), intercept_s, [slope_s] * 500, factors=noise
    )

    assert largest_change(sizes_of(decisions)[200:]) <= 0.05


def test_known_speeds_give_the_first_split():
    """The paper's static start, adding up to the global batch."""
    assert DynamicBatching(speeds=(9, 12, 18)).init(TRIO).batch_size.tolist() == [22, 30, 44]


def test_a_batch_that_lost_throughput_becomes_the_largest():
    """A cliff in memory: 40 samples/s below 50 samples, 20 above. The cap keeps it below."""

    def seconds(sizes):
        return sizes / np.where(np.arange(3) == 0, np.where(sizes > 50, 20, 40), 10)

    policy, sizes = DynamicBatching(), []
    decision = policy.init(TRIO)
    for _ in range(60):
        compute_s = seconds(decision.batch_size)
        decision = policy.update(TRIO, measured(decision.batch_size, compute_s), decision.state)
        sizes.append(int(decision.batch_size[0]))

    assert max(sizes) > 50
    assert max(sizes[10:]) <= 50


def test_a_learned_cap_expires():
    """Once the cliff is gone, the larger batch is tried again after `cap_steps`."""
    policy, sizes = DynamicBatching(cap_steps=10), []
    decision = policy.init(TRIO)
    for step in range(60):
        cliff = decision.batch_size[0] > 50 and step < 15
        compute_s = decision.batch_size / np.array([20.0 if cliff else 40.0, 10.0, 10.0])
        decision = policy.update(TRIO, measured(decision.batch_size, compute_s), decision.state)
        sizes.append(decision.batch_size.tolist())

    assert max(row[0] for row in sizes[8:12]) <= 50
    assert sizes[-1] == [64, 16, 16]


def test_the_first_step_after_a_resize_is_trusted_less():
    """A change of 6 % is past the dead-band, but one step is little to go by."""
    cluster, slope_s = Cluster(8, 800), np.full(8, 0.001)
    slope_s[0] *= 1.07

    sizes = sizes_of(follow(DynamicBatching(), cluster, 0.0, [slope_s] * 5))

    assert (sizes[:3, 0] == 100).all()
    assert sizes[3, 0] == 94


@pytest.mark.parametrize(
    "settings",
    [
        {"dead_band": -0.1},
        {"smoothing": 0.0},
        {"speeds": (1.0, 0.0)},
        {"speeds": ()},
        {"speeds": (1.0, float("nan"))},
        {"speeds": (1.0, float("inf"))},
        {"cap_fall": 0.0},
        {"cap_steps": -1},
        {"smoothing": float("nan")},
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(settings):
    """The message names class and argument."""
    with pytest.raises(ValueError, match=rf"`DynamicBatching\({next(iter(settings))}=...\)` must"):
        DynamicBatching(**settings)


def test_speeds_for_another_cluster_are_refused():
    """At the start, with the number that would do."""
    with pytest.raises(ValueError, match=r"must have 3 entries, one per rank, got 2"):
        DynamicBatching(speeds=(1.0, 2.0)).init(TRIO)
