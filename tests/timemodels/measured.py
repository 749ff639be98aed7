"""Profiles as a noisy machine would measure them."""

import numpy as np

from evenstep.timemodels import Profile

DOUBLING = 2 ** np.arange(1, 9)
DENSE = np.unique(
    np.concatenate([2 ** np.arange(9), np.arange(24, 257, 24), np.arange(33, 257, 32)])
)


def of_one(model, *parameters):
    """A model of one worker."""
    return model(*(np.array([each]) for each in parameters))


def curve(times, sizes=None):
    """The seconds of one worker at many sizes, at all up to 256 unless told."""
    sizes = np.arange(1, 257) if sizes is None else sizes
    return np.array([float(times.seconds(np.array([size]))[0]) for size in sizes])


def profile(truth, sizes, *, seed=0, noise=0.02, repeats=5):
    """Sizes and seconds of one worker, each in a list of one."""
    sizes = np.repeat(sizes, repeats)
    factors = 1 + noise * np.random.default_rng(seed).standard_normal(len(sizes))
    return [sizes], [curve(truth, sizes) * factors]


def fit(model, sizes, seconds):
    """Curves of one kind for all of them."""
    return model.fitted([Profile(*each) for each in zip(sizes, seconds, strict=True)])
