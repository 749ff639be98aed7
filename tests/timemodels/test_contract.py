"""What every time model promises, whatever its curve."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import AffineTime, Cluster, allocate, timemodels
from evenstep.timemodels import AbstractTimeModel, CubicTime, PiecewiseTime
from tests.solve.split_reference import by_enumeration, by_table, keeps_the_rules

REACH = 60  # as far as the tables go


def costs(random, world_size):
    """Plain costs, whole ones that tie, none at all, and slopes below an intercept's last bit."""
    plain = random.uniform(0, 5, world_size)
    awkward = random.choice([0.0, 1.0, 0.1, 1e-17, 1e9], world_size)
    return np.where(random.random(world_size) < 0.5, plain, awkward)


def affine(random, world_size):
    return AffineTime(costs(random, world_size), costs(random, world_size))


def piecewise(random, world_size):
    saturation = random.integers(0, REACH + 10, world_size)
    saturation = np.where(random.random(world_size) < 0.3, 0, saturation)
    return PiecewiseTime(costs(random, world_size), saturation, costs(random, world_size))


def cubic(random, world_size):
    coefficients = random.normal(size=(world_size, 4)) * [1e-4, 1e-2, 1, 10]
    coefficients[:, 3] = 40 + abs(coefficients[:, 3])  # some size takes time, however it falls
    coefficients[random.random(world_size) < 0.3, :2] = 0
    return CubicTime(coefficients, random.integers(1, REACH + 10, world_size))


DRAWN = {
    AffineTime: affine,
    CubicTime: cubic,
    PiecewiseTime: piecewise,
}


SEEDS = st.integers(0, 2**32)
every_model = pytest.mark.parametrize("model", DRAWN, ids=lambda model: model.__name__)


def drawn(model, seed, world_size=4):
    """A random model, and its seconds at every size, ``(world_size, REACH + 1)``."""
    times = DRAWN[model](np.random.default_rng(seed), world_size)
    sizes = range(REACH + 1)
    return times, np.stack([times.seconds(np.full(world_size, b)) for b in sizes], axis=1)


def test_every_public_model_is_held_to_the_contract():
    """A new one has to be drawn here."""
    public = {getattr(timemodels, name) for name in timemodels.__all__}
    models = {each for each in public if isinstance(each, type)}

    assert {each for each in models if issubclass(each, AbstractTimeModel)} <= {
        AbstractTimeModel,
        *DRAWN,
    }


@every_model
@given(SEEDS)
def test_times_are_finite_start_at_nothing_and_never_fall(model, seed):
    """Down to the last bit, since the solver compares floats."""
    times, seconds = drawn(model, seed)

    assert times.world_size == 4
    assert np.isfinite(seconds).all()
    assert (seconds[:, 0] == 0).all()
    assert (np.diff(seconds, axis=1) >= 0).all()


@every_model
@given(SEEDS, st.data())
def test_the_largest_batch_is_that_of_counting(model, seed, data):
    """At times that some size takes and at the floats beside them, under a cap for each worker."""
    times, seconds = drawn(model, seed)
    random = np.random.default_rng(seed)
    most = random.integers(0, REACH + 1, 4)
    at = float(random.choice(seconds.ravel()))
    budget_s = data.draw(
        st.sampled_from([at, np.nextafter(at, -1), np.nextafter(at, np.inf), -1.0, at / 2])
    )
    batch = times.largest_batch(budget_s, most)

    expected = [
        max((b for b in range(cap + 1) if row[b] <= budget_s), default=0)
        for row, cap in zip(seconds, most, strict=True)
    ]
    assert batch.tolist() == expected
    assert batch.dtype == np.int64


@every_model
def test_the_split_is_as_good_as_the_best_of_all(model):
    """Against every split there is, and against dynamic programming where those are too many."""
    for seed in range(60):
        random = np.random.default_rng(seed)
        world_size = int(random.integers(1, 5))
        times = DRAWN[model](random, world_size)
        few = world_size < 4
        total = int(random.integers(world_size, 14 if few else 40))
        cluster = Cluster(world_size, total, int(random.integers(0, 2)))
        split = allocate(times, cluster)
        best_s = by_enumeration(times, cluster) if few else by_table(times, cluster)

        assert keeps_the_rules(split, cluster), seed
        assert times.seconds(split).max() == best_s, seed


@every_model
def test_a_model_is_a_value(model):
    """Its fields cannot be set, nor its arrays written to, and asking changes no argument."""
    times = DRAWN[model](np.random.default_rng(0), 3)
    batch = np.array([1, 2, 3])
    times.seconds(batch)
    times.largest_batch(1.0, batch)
    fields = [getattr(times, each.name) for each in dataclasses.fields(times) if each.init]
    arrays = [each for field in fields for each in (field if type(field) is tuple else [field])]

    assert batch.tolist() == [1, 2, 3]
    assert not any(each.flags.writeable for each in arrays if isinstance(each, np.ndarray))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(times, dataclasses.fields(times)[0].name, None)
