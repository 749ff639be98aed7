"""When `auto` goes back to the equal split, as others cost more than they save."""

import numpy as np
import pytest

from evenstep import AffineTime, Cluster
from evenstep.policies import Auto
from evenstep.policies._proof import no_proof, proved, why_equal

from .simulated import jitter, measured


def padded_steps(num_steps, seed):
    """Return a run's seconds, and those of the equal split: padded texts of very unlike lengths.

    A worker's samples take as long as the longest of them: chance makes workers look unlike, and a
    large share is likely to have a long one.
    """
    rng, cluster = np.random.default_rng(seed), Cluster(4, 32)
    decision = equal = Auto().init(cluster)
    took = []
    for _ in range(num_steps):
        length = np.clip(rng.lognormal(5.5, 1.5, 32), 1, 16384)
        each_s = 1e-9 * (512 * length + length**2)
        compute_s, equal_s = (
            sizes * np.maximum.reduceat(each_s, np.cumsum(sizes) - sizes)
            for sizes in (decision.batch_size, equal.batch_size)
        )
        took.append((compute_s.max(), equal_s.max()))
        decision = Auto().update(cluster, measured(decision.batch_size, compute_s), decision.state)
    return np.array(took)


def test_what_costs_more_than_it_saves_is_given_up():
    """Where speeds are chance, the equal split is gone back to: without that, it is 40 % more."""
    runs = [padded_steps(150, seed)[45:].sum(axis=0) for seed in range(4)]
    took_s, equal_s = np.sum(runs, axis=0)

    assert took_s <= 1.2 * equal_s


def test_a_worker_that_turns_slow_while_sizes_stay_equal_is_followed():
    """After eight steps in which it was the slowest one."""
    equal, times = np.full(4, 8), AffineTime(np.zeros(4), np.full(4, 0.01))
    proof = no_proof()
    for _ in range(10):
        sizes = np.array([20, 4, 4, 4])
        proof = proved(proof, measured(sizes, np.array([0.9, 0.1, 0.1, 0.1])), times, equal)
    assert why_equal(proof)
    for step in range(8):
        assert why_equal(proof)
        seconds = np.array([0.1, 0.1, 0.3 - 0.001 * step, 0.1])
        proof = proved(proof, measured(equal, seconds), times, equal)

    assert not why_equal(proof)


def beside_a_cliff(jump, num_steps, *, grows_at=None):
    """Return a run's steps beside equal ones, and reasons: past 150 samples, any worker is slower.

    Workers are two times apart. From ``grows_at`` on, all times are six times as long.
    """
    cluster, decision, took_s, equal_s = Cluster(4, 512), Auto().init(Cluster(4, 512)), [], []
    reasons = set()
    noise = jitter(0.03, num_steps, 4, seed=2)
    for step in range(num_steps):
        each_s = np.array([1.0, 1.2, 1.6, 2.0]) * 1e-3 * noise[step]
        each_s *= 6.0 if grows_at is not None and step >= grows_at else 1.0
        sizes = decision.batch_size
        seconds = sizes * each_s * np.where(sizes > 150, jump, 1.0)
        took_s.append(seconds.max())
        equal_s.append((128 * each_s).max())
        decision = Auto().update(cluster, measured(sizes, seconds), decision.state)
        reasons.add(decision.reason)
    return np.array(took_s), np.array(equal_s), reasons


@pytest.mark.parametrize("jump", [3.0, 5.0])
def test_times_that_jump_at_a_size_are_left_for_the_equal_split(jump):
    """As where memory is swapped: no line tells it, and one worker is the slowest at all times."""
    took_s, equal_s, reasons = beside_a_cliff(jump, 200)

    assert took_s[:10].max() > 2 * equal_s.max()
    assert "equal: steps at other sizes took at least twice as long as equal ones" in reasons
    assert took_s.sum() <= 1.3 * equal_s.sum()
    assert took_s[100:].sum() <= 1.1 * equal_s[100:].sum()


def test_load_that_grows_on_all_workers_is_no_reason_to_stay_equal():
    """The equal split takes three readings to show that it has grown there, too."""
    took_s, equal_s, _ = beside_a_cliff(1.0, 100, grows_at=30)

    assert np.count_nonzero(took_s[1:] == equal_s[1:]) <= 3
    assert took_s[30:].sum() <= 0.8 * equal_s[30:].sum()
