"""Scenarios past straight lines, free memory and a world that stays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from ._reference import steady
from ._scenario import Scenario


def _spot(draw: Generator, world_size: int, num_steps: int) -> Scenario:
    """Every second worker is reclaimed with 0.5 % a step and replaced with 2 %; the rest stay."""
    times = steady(draw, world_size, num_steps)
    presence = np.empty((num_steps, world_size), np.bool_)
    on_demand = np.arange(world_size) % 2 == 0
    here = np.ones(world_size, np.bool_)
    for row in presence:
        luck = draw.random(world_size)
        here = np.where(here, luck > 0.005, luck < 0.02) | on_demand
        row[:] = here
    return Scenario("spot", times.intercept_s, times.slope_s, times.jitter, presence=presence)


def _saturated(draw: Generator, world_size: int, num_steps: int) -> Scenario:
    """Devices that take 40 to 120 ms for anything that does not fill them."""
    times = steady(draw, world_size, num_steps)
    flat_s = draw.uniform(0.04, 0.12, world_size)
    saturation = np.round(flat_s / times.slope_s[0]).astype(np.int64)
    return Scenario(
        "saturated", times.intercept_s, times.slope_s, times.jitter, saturation=saturation
    )


def _capped(draw: Generator, world_size: int, num_steps: int) -> Scenario:
    """Memory for three sizes on every worker; 96 samples or more a worker fit on the whole."""
    times = steady(draw, world_size, num_steps)
    caps = draw.permutation(np.resize([192, 48, 96], world_size))
    return Scenario("capped", times.intercept_s, times.slope_s, times.jitter, max_batch_size=caps)


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


UNLIKE: dict[str, Callable[[Generator, int, int], Scenario]] = {
    "spot": _spot,
    "saturated": _saturated,
    "capped": _capped,
    "mixed": _mixed,
}
