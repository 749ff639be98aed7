"""Caps that grow with what was seen to fit, and never past it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._run._estimates import decode, encode
from evenstep.timemodels._memory_model import MemoryModel

GB = 10**9
NONE = np.array([777])


def visited(model, *visits, capacity=10 * GB):
    """Return the state of one worker after `(size, peak)` visits."""
    state = model.init(1)
    for size, peak in visits:
        state = model.update(state, np.array([size]), np.array([peak]), np.array([capacity]))
    return state


def cap(model, *visits, capacity=10 * GB):
    return int(model.caps(visited(model, *visits, capacity=capacity), NONE)[0])


def test_nothing_known_is_the_callers_default():
    """Per worker: the others have their own caps."""
    model = MemoryModel()
    known = np.array([0, 10])
    state = model.update(model.init(2), known, known * GB // 2, np.full(2, 10 * GB))

    assert model.caps(state, np.array([64, 64])).tolist() == [64, 18]


@pytest.mark.parametrize("missing", range(3))
def test_a_measurement_with_a_hole_teaches_nothing(missing):
    """Neither size nor peak nor capacity alone says what fits."""
    measured = [np.array([8]), np.array([GB]), np.array([10 * GB])]
    measured[missing] = np.array([0])
    model = MemoryModel()

    assert model.caps(model.update(model.init(1), *measured), NONE) == 777


def test_one_size_is_taken_to_scale():
    """10 samples in 5 of 10 GB, of which 9 may be planned: 18."""
    assert cap(MemoryModel(), (10, 5 * GB)) == 18


def test_two_sizes_far_apart_tell_weights_from_samples():
    """4 GB and 0.1 GB a sample: 50 fill 9 GB, where scaling from 20 would stop at 30."""
    model = MemoryModel(growth=10, noise=0)

    assert cap(model, (10, 5 * GB), (20, 6 * GB)) == 50
    assert cap(model, (20, 6 * GB)) == 30


def test_two_sizes_close_together_say_hardly_more_than_one():
    """One sample more, and by noise not a byte more: no reason to plan for a flat line."""
    model = MemoryModel(growth=10)

    assert cap(model, (64, 5 * GB), (65, 5 * GB)) <= cap(model, (65, 5 * GB)) == 117


def test_every_peak_lies_under_the_line():
    """The highest peak of a size counts, and one above the trend raises the whole line."""
    model = MemoryModel(growth=10, noise=0)
    calm = cap(model, (10, 2 * GB), (20, 3 * GB), (30, 4 * GB))
    hiccup = cap(model, (10, 2 * GB), (20, 3 * GB), (20, 5 * GB), (30, 4 * GB), (20, 3 * GB))

    assert calm == 80
    assert hiccup == 60


def test_growth_is_checked_on_the_way_up():
    """Twice the largest size that fitted at most, whatever the line says."""
    assert cap(MemoryModel(), (8, GB // 100)) == 16
    assert cap(MemoryModel(growth=1.5), (8, GB // 100)) == 12


@pytest.mark.parametrize("peak", [9.5, 10])
def test_a_size_that_fitted_is_never_taken_back(peak):
    """Also where it ate into the safety margin."""
    assert cap(MemoryModel(), (40, int(peak * GB))) == 40


def test_a_size_that_did_not_fit_is_not_planned_again():
    """A peak above the capacity says so; below it the line decides."""
    assert cap(MemoryModel(), (40, 4 * GB), (64, 10 * GB + 1)) == 57
    assert cap(MemoryModel(), (40, 10 * GB + 1)) == 35
    assert cap(MemoryModel(), (1, 100 * GB)) == 1
    assert cap(MemoryModel(safety=1), (64, 10**12 + 1), capacity=10**12) == 63


def test_a_capacity_that_shrinks_takes_the_cap_along():
    """The newest one counts: another process may have taken the rest."""
    model = MemoryModel()
    state = visited(model, (10, 5 * GB))
    state = model.update(state, np.array([5]), np.array([5 * GB // 2]), np.array([6 * GB]))

    assert model.caps(state, NONE) == 10


@given(
    st.floats(0, 6 * GB),
    st.floats(GB / 1000, GB / 10),
    st.integers(4, 30),
    st.integers(0, 2**32),
)
def test_growing_up_to_the_cap_never_bursts(base, per_sample, size, seed):
    """Each step runs at the cap, with peaks right to 1 %, and gets close to what fits."""
    random, model = np.random.default_rng(seed), MemoryModel()
    state, fits = model.init(1), int((9 * GB - base) / per_sample)
    for _ in range(20):
        peak = int((base + per_sample * size) * random.uniform(0.99, 1))
        state = model.update(state, np.array([size]), np.array([peak]), np.array([10 * GB]))
        size = int(model.caps(state, NONE)[0])

        assert base + per_sample * size <= 10 * GB
    assert size >= min(0.8 * fits, 1e5)


def test_many_sizes_are_kept_in_a_small_state():
    """What is forgotten never raises the cap above that of all peaks together."""
    random, exact = np.random.default_rng(0), MemoryModel(growth=100, noise=0)
    visits = [(int(b), int(GB + b * GB / 100)) for b in random.permutation(np.arange(1, 101))]
    state = visited(exact, *visits)

    assert sum(array.nbytes for array in state) <= 200
    assert 780 <= exact.caps(state, NONE)[0] <= 800


def test_a_forgotten_size_leaves_its_peak_behind():
    """The next larger size takes it over, so the cap stays below that of a calm run."""
    model = MemoryModel(growth=100, noise=0)
    calm = [(b, GB + b * GB // 100) for b in range(10, 110, 10)]
    hiccup = [(55, 4 * GB), (50, GB * 3 // 2), *calm]

    assert 55 not in visited(model, *hiccup)[0]
    assert cap(model, *hiccup) < cap(model, *calm) - 100


def test_the_state_is_plain_and_inputs_are_left_alone():
    """It survives a checkpoint, and an update returns a new one."""
    model = MemoryModel()
    state = visited(model, (10, 5 * GB))
    before = encode(state)
    later = model.update(state, np.array([20]), np.array([6 * GB]), np.array([10 * GB]))

    assert encode(state) == before
    assert model.caps(decode(encode(later)), NONE) == model.caps(later, NONE)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("safety", 0), ("safety", 1.1), ("growth", 1), ("growth", float("inf")), ("noise", -1)],
)
def test_an_argument_out_of_range_is_named(name, bad):
    """The message gives class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=rf"`MemoryModel\({name}=...\)` must .*, got {bad}\. "):
        MemoryModel(**{name: bad})
