"""What other splits would have cost; a worker that costs more than it brings is named."""

import numpy as np
import pytest

from evenstep import Cluster, StepTimings
from evenstep._planner._whatif import WhatIf


def shown(intercept_s, slope_s):
    """What is known after steps at three splits without noise."""
    what_if = WhatIf(len(intercept_s))
    for sizes in ([32, 32, 32], [40, 40, 16], [44, 44, 8]):
        batch_size = np.array(sizes)
        what_if.observe(StepTimings(batch_size, intercept_s + slope_s * batch_size, np.zeros(3)))
    return what_if


def test_who_needs_longer_for_one_sample_than_the_others_for_all_is_named():
    """With both times: two workers share 96 samples in 0.48 s, the third begins with 0.6 s."""
    what_if = shown(np.array([0.0, 0.0, 0.6]), np.array([0.01, 0.01, 0.01]))

    burden = what_if.burden(Cluster(3, 96))

    assert burden.rank == 2
    assert burden.without_s == pytest.approx(0.48, rel=0.01)
    assert burden.with_s == pytest.approx(0.61, rel=0.02)


@pytest.mark.parametrize("intercept_s", [0.0, 0.3])
def test_a_slow_worker_that_helps_is_not(intercept_s):
    """However slow: what it takes over, the others need not compute."""
    what_if = shown(np.array([0.0, 0.0, intercept_s]), np.array([0.01, 0.01, 0.1]))

    assert what_if.burden(Cluster(3, 96)) is None


def test_whoever_is_needed_is_not():
    """The others' memory does not hold the batch."""
    what_if = shown(np.array([0.0, 0.0, 0.6]), np.array([0.01, 0.01, 0.01]))

    assert what_if.burden(Cluster(3, 96, max_batch_size=47)) is None


def test_nobody_is_as_long_as_somebody_was_not_measured():
    """Nor in a cluster of one."""
    assert WhatIf(3).burden(Cluster(3, 96)) is None
    assert WhatIf(1).burden(Cluster(1, 96)) is None


def test_other_splits_follow_a_rank_that_slows_down():
    """Within eight fits, as splits to compare with are worked out that often on long runs."""
    what_if, cluster = WhatIf(2), Cluster(2, 64)
    for number in range(100):
        slope_s = np.array([0.01, 0.01 if number < 60 else 0.03])
        batch_size = np.array([32 + number % 5, 32 - number % 5])
        timings = StepTimings(batch_size, slope_s * batch_size, np.zeros(2))
        what_if.observe(timings)
        costs = what_if.costs(cluster, timings)

    assert costs.equal_s == pytest.approx(0.96, rel=0.02)
    assert costs.best_s == pytest.approx(0.48, rel=0.05)


def test_what_a_worker_without_samples_took_means_nothing():
    """NaN, as nothing was measured."""
    what_if = WhatIf(3)
    shown = StepTimings(np.array([48, 48, 0]), np.array([0.002, 0.001, np.nan]), np.zeros(3))
    for _ in range(4):
        what_if.observe(shown)

    assert what_if.state["num_steps"].tolist() == [4, 4, 0]


def test_equal_workers_are_no_burden_by_the_short_last_steps_of_epochs():
    """Of a few milliseconds, one by itself says little: some take as long as a full one."""
    for seed in range(20):
        what_if, rng = WhatIf(2), np.random.default_rng(seed)
        for number in range(260):
            is_tail = number % 53 == 52
            sizes = np.full(2, 16 if is_tail else 32)
            seconds = (0.0012 + 0.00003 * sizes) * rng.lognormal(0, 0.2, 2)
            seconds += rng.exponential(0.0005, 2) if is_tail else 0
            what_if.observe(StepTimings(sizes, seconds, np.zeros(2)), is_tail=is_tail)

            assert number % 10 or what_if.burden(Cluster(2, 64)) is None, seed


def test_equal_workers_are_no_burden_as_noise_hides_what_samples_cost():
    """Sizes differ by less than a step's noise: what twice as many take is not known."""
    for seed in range(40):
        what_if, rng = WhatIf(2), np.random.default_rng(seed)
        for number in range(200):
            more = int(rng.integers(-3, 4))
            batch_size = np.array([32 + more, 32 - more])
            seconds = (1.2 + 0.04 * batch_size) * rng.normal(1, 0.2, 2)
            what_if.observe(StepTimings(batch_size, seconds, np.zeros(2)))

            assert number % 10 or what_if.burden(Cluster(2, 64)) is None, seed
