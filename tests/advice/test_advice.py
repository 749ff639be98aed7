"""Advice is what trying every choice of workers would have said."""

from itertools import combinations

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, allocate
from evenstep.advice import advise


def workers(seed, num_workers):
    """Return unlike workers, some with a fixed cost that no share can make up for."""
    draw = np.random.default_rng(seed)
    intercept_s = draw.uniform(0.0, 0.05, num_workers) * draw.choice([1, 40], num_workers)
    return AffineTime(intercept_s, 1e-3 * np.exp(draw.uniform(0, np.log(50), num_workers)))


def best_of(times, total, ranks):
    """The step time of some workers, each with a sample at least."""
    ranks = list(ranks)
    some = AffineTime(times.intercept_s[ranks], times.slope_s[ranks])
    return some.seconds(allocate(some, Cluster(len(ranks), total))).max()


def all_choices(ranks):
    return (chosen for many in range(1, len(ranks) + 1) for chosen in combinations(ranks, many))


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_of_workers_is_faster(seed):
    """Not of all, not of those that are left without one, not of all and a newcomer."""
    times, total, more = workers(seed, 5), 64, AffineTime(np.array([0.01]), np.array([0.002]))
    advice = advise(times, total, more=more)
    grown = AffineTime(np.append(times.intercept_s, 0.01), np.append(times.slope_s, 0.002))

    def least(of, ranks):
        return min(best_of(of, total, chosen) for chosen in all_choices(ranks))

    assert advice.balanced.step_s == pytest.approx(best_of(times, total, range(5)))
    assert advice.best.step_s == pytest.approx(least(times, range(5)))
    assert advice.more[0].step_s == pytest.approx(least(grown, range(6)))
    for rank, without in enumerate(advice.without):
        assert without.step_s == pytest.approx(least(times, [r for r in range(5) if r != rank]))
        assert without.batch_size[rank] == 0


@pytest.mark.parametrize("seed", range(6))
def test_all_splits_hold_the_same_global_batch(seed):
    """Whoever takes part, and within the caps."""
    times, caps = workers(seed, 5), np.array([10, 20, 40, 20, 30])
    advice = advise(times, 64, max_batch_size=caps, more=times)
    splits = [advice.equal, advice.balanced, advice.best, *advice.without]

    assert {sum(split.batch_size) for split in [*splits, *advice.more]} == {64}
    assert all((np.array(split.batch_size) <= caps).all() for split in splits)
    assert min(advice.balanced.batch_size) >= 1


def test_two_that_hold_each_other_back_are_both_named():
    """Without the one, the other is as slow: neither alone says what both cost."""
    times = AffineTime(np.array([0.01, 0.01, 5.0, 5.0]), np.full(4, 0.001))
    advice = advise(times, 100)

    assert advice.worth_keeping == (True, True, False, False)
    assert advice.brings(0) > 0.5
    assert advice.brings(2) == advice.brings(3) < -0.9
    assert advice.balanced.step_s > 5 > 50 * advice.best.step_s


def test_who_is_needed_for_memory_has_no_time_without():
    """Nobody can say what a step takes that does not fit."""
    advice = advise(AffineTime(np.zeros(2), np.ones(2)), 10, max_batch_size=np.array([8, 20]))

    assert advice.brings(1) is None
    assert advice.without[0].batch_size == (0, 10)


def test_overhead_counts_in_every_step():
    """A machine that halves the computing does not halve the step."""
    times = AffineTime(np.zeros(1), np.ones(1))
    alone, more = advise(times, 10, more=times), advise(times, 10, more=times, overhead_s=5)

    assert (alone.balanced.step_s, more.balanced.step_s) == (10, 15)
    assert (alone.adds(0), more.adds(0)) == (0.5, pytest.approx(1 / 3))


def test_a_newcomer_has_its_cap():
    """Its memory is what it is, however fast it is."""
    times, fast = AffineTime(np.zeros(1), np.ones(1)), AffineTime(np.zeros(1), np.full(1, 0.01))

    assert advise(times, 10, more=fast).more[0].batch_size == (0, 10)
    capped = advise(times, 10, more=fast, more_max_batch_size=np.array([4]))
    assert capped.more[0].batch_size == (6, 4)


@pytest.mark.parametrize("overhead_s", [-1.0, np.nan, np.inf])
def test_overhead_is_a_time(overhead_s):
    """Refused by its name."""
    with pytest.raises(ValueError, match="overhead_s"):
        advise(AffineTime(np.zeros(1), np.ones(1)), 10, overhead_s=overhead_s)
