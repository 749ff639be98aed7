"""Time models of every kind with random values, easy ones and awkward ones."""

import numpy as np

from evenstep import AffineTime
from evenstep.timemodels import CubicTime, PiecewiseTime, TableTime

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
    tile = random.choice([1, random.integers(1, REACH + 10)], world_size)
    saturation = np.where(random.random(world_size) < 0.3, 0, saturation)
    return PiecewiseTime(costs(random, world_size), saturation, costs(random, world_size), tile)


def cubic(random, world_size):
    coefficients = random.normal(size=(world_size, 4)) * [1e-4, 1e-2, 1, 10]
    coefficients[:, 3] = 40 + abs(coefficients[:, 3])  # some size takes time, however it falls
    coefficients[random.random(world_size) < 0.3, :2] = 0
    return CubicTime(coefficients, random.integers(1, REACH + 10, world_size))


def table(random, world_size):
    shape = world_size, REACH
    steps = np.cumsum(random.exponential(size=shape) * (random.random(shape) < 0.4), axis=1)
    return TableTime(np.concatenate([np.zeros((world_size, 1)), steps], axis=1))


DRAWN = {
    AffineTime: affine,
    CubicTime: cubic,
    PiecewiseTime: piecewise,
    TableTime: table,
}
