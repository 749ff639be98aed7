"""Local SGD: how many steps each rank takes alone, and what each weighs."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from benchmarks._local_sgd import LocalSgd

times = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=9).map(np.array)


@given(times, st.integers(1, 64))
def test_equal_numbers_of_steps(step_s, num_steps):
    """Whatever the times."""
    assert LocalSgd(num_steps).local_steps(step_s).tolist() == [num_steps] * len(step_s)


@given(times, st.integers(1, 64))
def test_by_speed_the_slowest_takes_as_many_as_asked(step_s, num_steps):
    """And no other less, or more than fit until the slowest is done."""
    steps = LocalSgd(num_steps, by_speed=True).local_steps(step_s)

    assert steps[np.argmax(step_s)] == num_steps == steps.min()
    assert (steps * step_s <= num_steps * step_s.max() * (1 + 1e-12)).all()
    assert ((steps + 1) * step_s > num_steps * step_s.max() * (1 - 1e-12)).all()


def test_parameters_are_averaged_by_samples():
    """H b each: 4 steps of 10 samples weigh as much as one of 40."""
    weights = LocalSgd(4).weights(np.array([4, 1, 8]), np.array([10, 40, 10]))

    assert weights.tolist() == [0.25, 0.25, 0.5]
