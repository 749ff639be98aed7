"""Profiles as a noisy machine would measure them."""

import numpy as np

from evenstep.timemodels import ClusterProfile, Profile
from evenstep.timemodels._fits import AFFINE, CUBIC, PIECEWISE, STAIRCASE
from evenstep.timemodels._fits import fit as fit_kind

DOUBLING = 2 ** np.arange(1, 9)
# Off the powers of two as well, where stairs show.
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


def profiled(sizes, seconds):
    """What the workers with these sizes and seconds would show."""
    profiles = [Profile(*each) for each in zip(sizes, seconds, strict=True)]
    return ClusterProfile([f"worker {rank}" for rank in range(len(profiles))], profiles)


def best_fit(sizes, seconds):
    """The kind of curve that foretells each of them best."""
    return profiled(sizes, seconds).best_fit()


def fit(kind, sizes, seconds):
    """Curves of one kind for all of them."""
    kinds = {each.name: each for each in (AFFINE, PIECEWISE, STAIRCASE, CUBIC)}
    return fit_kind(kinds[kind], profiled(sizes, seconds).profiles)
