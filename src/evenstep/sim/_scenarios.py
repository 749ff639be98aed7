"""Scenarios by name and seed: eight that policies are compared on, and four past straight lines.

The order of draws and of multiplications is part of their definition: another one gives other
numbers, if only in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from .._types import FloatArray
from ..exceptions import invalid
from ._scenario import Scenario


def scenario_names() -> tuple[str, ...]:
    """Return what ``scenario`` knows.

    The eight that policies are compared on come first, then those past straight lines, free
    memory and a world that stays.
    """
    return (*_LINES, *_DIFFERENT)


def scenario(name: str, world_size: int = 8, num_steps: int = 600, seed: int = 0) -> Scenario:
    """Return the scenario called ``name``, the same for the same arguments.

    Of workers that differ, 1 to 4 ms a sample and 2 to 20 ms a step, each step off by 2 %, unless
    the table says otherwise. With 64 samples a worker the best plan's step takes about 0.1 s.

    | name | what happens |
    |---|---|
    | `static` | nothing |
    | `step` | six lasting changes: a worker's cost is halved, doubled or tripled |
    | `drift` | speeds wander, with a standard deviation of 30 % |
    | `burst` | 2.5 times slower for 20 steps at a time, a sixth of the time |
    | `jitter` | 2 % of the single worker-steps take 1.5 to 4 times as long |
    | `diurnal` | a sine of 200 steps, 50 % up and down, own phase each |
    | `correlated` | half of the workers 2.2 times slower together, now and then |
    | `square` | square waves of 90 steps, 40 % up and down, own phase each |
    | `spot` | every second worker leaves now and then and comes back (`presence`) |
    | `saturated` | devices that need 40 to 120 ms for whatever does not fill them (`saturation`) |
    | `capped` | memory for 48, 96 or 192 samples (`max_batch_size`) |
    | `mixed` | GPUs, and CPUs a hundred times slower with a smaller fixed cost |

    Choose constants of a policy on seeds from 1000, and report on lower ones.

    Args:
        name: one of ``scenario_names()``.
        world_size: number of workers, at least 1.
        num_steps: at least 1.
        seed: at least 0.

    Raises:
        ValueError: an argument is out of range.
    """
    if name not in scenario_names():
        remedy = "A recorded one is read by `sim.read_trace`."
        rule = f"be one of {', '.join(scenario_names())}"
        raise invalid("scenario(name=...)", rule, repr(name), remedy)
    _check("world_size", world_size, least=1)
    _check("num_steps", num_steps, least=1)
    _check("seed", seed, least=0)
    draw = np.random.default_rng(seed)
    if name in _DIFFERENT:
        return _DIFFERENT[name](draw, world_size, num_steps)
    intercept_s, slope_s, jitter = _steady(draw, world_size, num_steps)
    _LINES[name](draw, slope_s, jitter)  # changes them in place
    return Scenario(name, intercept_s, slope_s, jitter)


def _check(name: str, value: int, *, least: int) -> None:
    if not isinstance(value, int | np.integer) or value < least:
        remedy = "The default is 8 workers, 600 steps, seed 0."
        raise invalid(f"scenario({name}=...)", f"be an integer >= {least}", repr(value), remedy)


Times = tuple[FloatArray, FloatArray, FloatArray]
"""Intercepts, slopes and jitter under construction: ``(W,)``, ``(T, W)`` and ``(T, W)``."""


def _steady(draw: Generator, world_size: int, num_steps: int) -> Times:
    """Return workers that differ, with nothing but 2 % of jitter."""
    base = 1e-3 * np.exp(draw.uniform(0, np.log(4), world_size))  # 1 to 4 ms a sample
    intercept_s = draw.uniform(2e-3, 2e-2, world_size)
    slope_s = np.tile(base, (num_steps, 1))
    jitter = np.exp(0.02 * draw.standard_normal((num_steps, world_size)))
    return intercept_s, slope_s, jitter


def _static(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """Nothing happens."""


def _step(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """Six lasting changes of one worker's cost."""
    num_steps, world_size = slope_s.shape
    for _ in range(6):
        worker, at = draw.integers(world_size), draw.integers(num_steps)
        slope_s[at:, worker] *= draw.choice([0.5, 2.0, 3.0])


def _drift(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """Ornstein-Uhlenbeck in the logarithm, about 30 % standard deviation."""
    at = np.zeros(slope_s.shape[1])
    for row in slope_s:
        at = 0.98 * at + 0.06 * draw.standard_normal(len(at))
        row *= np.exp(at)


def _burst(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """On with 1 % a step, off with 5 %, 2.5 times slower while on."""
    on = np.zeros(slope_s.shape[1], np.bool_)
    for row in slope_s:
        on = np.where(on, draw.random(len(on)) > 0.05, draw.random(len(on)) < 0.01)
        row *= np.where(on, 2.5, 1.0)


def _jitter(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """2 % of the single worker-steps take 1.5 to 4 times as long."""
    shape = jitter.shape
    jitter[:] *= np.where(draw.random(shape) < 0.02, draw.uniform(1.5, 4.0, shape), 1.0)


def _diurnal(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """A sine of period 200 steps, own phase each."""
    slope_s[:] *= 1 + 0.5 * np.sin(_angle(draw, slope_s, 200))


def _correlated(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """Half of the workers share a host, 2.2 times slower now and then."""
    num_steps, world_size = slope_s.shape
    shared = np.cumsum(draw.random(num_steps) < 0.012) % 2
    slope_s[:, : world_size // 2] *= np.where(shared, 2.2, 1.0)[:, np.newaxis]


def _square(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """Square waves of period 90 steps, own phase each."""
    slope_s[:] *= 1 + 0.4 * np.sign(np.sin(_angle(draw, slope_s, 90)))


def _angle(draw: Generator, slope_s: FloatArray, period: int) -> FloatArray:
    num_steps, world_size = slope_s.shape
    turns = 2 * np.pi * np.arange(num_steps)[:, np.newaxis] / period
    angle: FloatArray = turns + draw.uniform(0, 2 * np.pi, world_size)
    return angle


_LINES: dict[str, Callable[[Generator, FloatArray, FloatArray], None]] = {
    "static": _static,
    "step": _step,
    "drift": _drift,
    "burst": _burst,
    "jitter": _jitter,
    "diurnal": _diurnal,
    "correlated": _correlated,
    "square": _square,
}


def _spot(draw: Generator, world_size: int, num_steps: int) -> Scenario:
    """Every second worker is reclaimed with 0.5 % a step and replaced with 2 %; the rest stay."""
    times = _steady(draw, world_size, num_steps)
    presence = np.empty((num_steps, world_size), np.bool_)
    on_demand = np.arange(world_size) % 2 == 0
    here = np.ones(world_size, np.bool_)
    for row in presence:
        luck = draw.random(world_size)
        here = np.where(here, luck > 0.005, luck < 0.02) | on_demand
        row[:] = here
    return Scenario("spot", *times, presence=presence)


def _saturated(draw: Generator, world_size: int, num_steps: int) -> Scenario:
    """Devices that take 40 to 120 ms for anything that does not fill them."""
    times = _steady(draw, world_size, num_steps)
    flat_s = draw.uniform(0.04, 0.12, world_size)
    saturation = np.round(flat_s / times[1][0]).astype(np.int64)
    return Scenario("saturated", *times, saturation=saturation)


def _capped(draw: Generator, world_size: int, num_steps: int) -> Scenario:
    """Memory for three sizes on every worker; 96 samples or more a worker fit on the whole."""
    times = _steady(draw, world_size, num_steps)
    caps = draw.permutation(np.resize([192, 48, 96], world_size))
    return Scenario("capped", *times, max_batch_size=caps)


def _mixed(draw: Generator, world_size: int, num_steps: int) -> Scenario:
    """GPUs at 20 to 80 us a sample and 5 to 20 ms a step; every second worker a CPU.

    The CPUs take 2 to 8 ms a sample and 1 to 5 ms a step.
    """
    is_cpu = np.arange(world_size) % 2 == 1
    factor = np.exp(draw.uniform(0, np.log(4), world_size))
    base = np.where(is_cpu, 2e-3, 2e-5) * factor
    low_s, high_s = np.where(is_cpu, 1e-3, 5e-3), np.where(is_cpu, 5e-3, 2e-2)
    intercept_s = draw.uniform(low_s, high_s)
    jitter = np.exp(0.02 * draw.standard_normal((num_steps, world_size)))
    return Scenario("mixed", intercept_s, np.tile(base, (num_steps, 1)), jitter)


_DIFFERENT: dict[str, Callable[[Generator, int, int], Scenario]] = {
    "spot": _spot,
    "saturated": _saturated,
    "capped": _capped,
    "mixed": _mixed,
}
