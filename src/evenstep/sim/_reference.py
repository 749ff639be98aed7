"""The eight scenarios that policies are compared on.

The order of draws and of multiplications is part of their definition: another one gives other
numbers, if only in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from .._types import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Times under construction, changed in place: ``(W,)``, ``(T, W)`` and ``(T, W)``."""

    intercept_s: FloatArray
    slope_s: FloatArray
    jitter: FloatArray


def steady(draw: Generator, world_size: int, num_steps: int) -> Times:
    """Return unlike workers with nothing but 2 % of jitter."""
    base = 1e-3 * np.exp(draw.uniform(0, np.log(4), world_size))  # 1 to 4 ms a sample
    intercept_s = draw.uniform(2e-3, 2e-2, world_size)
    slope_s = np.tile(base, (num_steps, 1))
    jitter = np.exp(0.02 * draw.standard_normal((num_steps, world_size)))
    return Times(intercept_s, slope_s, jitter)


def _static(draw: Generator, times: Times) -> None:
    """Nothing happens."""


def _step(draw: Generator, times: Times) -> None:
    """Six lasting changes of one worker's cost."""
    num_steps, world_size = times.slope_s.shape
    for _ in range(6):
        worker, at = draw.integers(world_size), draw.integers(num_steps)
        times.slope_s[at:, worker] *= draw.choice([0.5, 2.0, 3.0])


def _drift(draw: Generator, times: Times) -> None:
    """Ornstein-Uhlenbeck in the logarithm, about 30 % standard deviation."""
    at = np.zeros(times.slope_s.shape[1])
    for row in times.slope_s:
        at = 0.98 * at + 0.06 * draw.standard_normal(len(at))
        row *= np.exp(at)


def _burst(draw: Generator, times: Times) -> None:
    """On with 1 % a step, off with 5 %, 2.5 times slower while on."""
    on = np.zeros(times.slope_s.shape[1], np.bool_)
    for row in times.slope_s:
        on = np.where(on, draw.random(len(on)) > 0.05, draw.random(len(on)) < 0.01)
        row *= np.where(on, 2.5, 1.0)


def _jitter(draw: Generator, times: Times) -> None:
    """2 % of the single worker-steps take 1.5 to 4 times as long."""
    shape = times.jitter.shape
    times.jitter[:] *= np.where(draw.random(shape) < 0.02, draw.uniform(1.5, 4.0, shape), 1.0)


def _diurnal(draw: Generator, times: Times) -> None:
    """A sine of period 200 steps, own phase each."""
    times.slope_s[:] *= 1 + 0.5 * np.sin(_angle(draw, times, 200))


def _correlated(draw: Generator, times: Times) -> None:
    """Half of the workers share a host, 2.2 times slower now and then."""
    num_steps, world_size = times.slope_s.shape
    shared = np.cumsum(draw.random(num_steps) < 0.012) % 2
    times.slope_s[:, : world_size // 2] *= np.where(shared, 2.2, 1.0)[:, np.newaxis]


def _square(draw: Generator, times: Times) -> None:
    """Square waves of period 90 steps, own phase each."""
    times.slope_s[:] *= 1 + 0.4 * np.sign(np.sin(_angle(draw, times, 90)))


def _angle(draw: Generator, times: Times, period: int) -> FloatArray:
    num_steps, world_size = times.slope_s.shape
    turns = 2 * np.pi * np.arange(num_steps)[:, np.newaxis] / period
    angle: FloatArray = turns + draw.uniform(0, 2 * np.pi, world_size)
    return angle


LINES: dict[str, Callable[[Generator, Times], None]] = {
    "static": _static,
    "step": _step,
    "drift": _drift,
    "burst": _burst,
    "jitter": _jitter,
    "diurnal": _diurnal,
    "correlated": _correlated,
    "square": _square,
}
