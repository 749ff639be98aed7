"""Scenarios by name and seed."""

from __future__ import annotations

import numpy as np

from ..exceptions import invalid
from ._reference import LINES, steady
from ._scenario import Scenario
from ._unlike import UNLIKE


def scenario_names() -> tuple[str, ...]:
    """Return what ``scenario`` knows.

    The eight that policies are compared on come first, then those past straight lines, free
    memory and a world that stays.
    """
    return (*LINES, *UNLIKE)


def scenario(name: str, world_size: int = 8, num_steps: int = 600, seed: int = 0) -> Scenario:
    """Return the scenario called ``name``, the same for the same arguments.

    Of unlike workers, 1 to 4 ms a sample and 2 to 20 ms a step, each step off by 2 %, unless the
    table says otherwise. With 64 samples a worker the best plan's step takes about 0.1 s.

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
    if name in UNLIKE:
        return UNLIKE[name](draw, world_size, num_steps)
    times = steady(draw, world_size, num_steps)
    LINES[name](draw, times)
    return Scenario(name, times.intercept_s, times.slope_s, times.jitter)


def _check(name: str, value: int, *, least: int) -> None:
    if not isinstance(value, int | np.integer) or value < least:
        remedy = "The default is 8 workers, 600 steps, seed 0."
        raise invalid(f"scenario({name}=...)", f"be an integer >= {least}", repr(value), remedy)
