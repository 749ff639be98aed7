"""Reference scenarios: the seconds each worker needs, step by step.

The time of worker i in step t with b samples is ``(intercept_s[i] + slope_s[t, i] * b) *
jitter[t, i]``. Constants of a policy are chosen on seeds from 1000, reports are on lower ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep import Cluster, sim
from evenstep.policies import AbstractPolicy

NAMES = ("static", "step", "drift", "burst", "jitter", "diurnal", "correlated", "square")


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """What the workers do.

    Attributes:
        intercept_s: fixed cost of a step, ``(world_size,)``.
        slope_s: cost per sample, ``(num_steps, world_size)``.
        jitter: factors on the whole, likewise.
    """

    intercept_s: np.ndarray
    slope_s: np.ndarray
    jitter: np.ndarray


def scenario(name: str, world_size: int = 8, num_steps: int = 600, seed: int = 0) -> Scenario:
    """Return the scenario called ``name``, one of ``NAMES``."""
    draw = np.random.default_rng(seed)
    base = 1e-3 * np.exp(draw.uniform(0, np.log(4), world_size))  # 1 to 4 ms a sample
    intercept_s = draw.uniform(2e-3, 2e-2, world_size)
    jitter = np.exp(0.02 * draw.standard_normal((num_steps, world_size)))
    if name == "jitter":  # 2 % of the single worker-steps take 1.5 to 4 times as long
        odd = draw.random(jitter.shape) < 0.02
        jitter *= np.where(odd, draw.uniform(1.5, 4.0, jitter.shape), 1.0)
    slowness = np.ones_like(jitter)
    if name in _SLOWNESS:
        slowness = _SLOWNESS[name](draw, num_steps, world_size)
    return Scenario(intercept_s, base * slowness, jitter)


def regret(policy: AbstractPolicy, given: Scenario, global_batch_size: int = 512) -> float:
    """Return mean step time over that of the plan that knows all but the jitter, less 1."""
    cluster = Cluster(len(given.intercept_s), global_batch_size)
    times = {"intercept_s": given.intercept_s, "slope_s": given.slope_s, "jitter": given.jitter}
    return sim.run(policy, cluster, **times).regret(sim.oracle(cluster, **times))


def _step(draw: np.random.Generator, num_steps: int, world_size: int) -> np.ndarray:
    """Six lasting changes of one worker's cost."""
    slowness = np.ones((num_steps, world_size))
    for _ in range(6):
        worker, at = draw.integers(world_size), draw.integers(num_steps)
        slowness[at:, worker] *= draw.choice([0.5, 2.0, 3.0])
    return slowness


def _drift(draw: np.random.Generator, num_steps: int, world_size: int) -> np.ndarray:
    """Ornstein-Uhlenbeck in the logarithm, about 30 % standard deviation."""
    at, rows = np.zeros(world_size), []
    for _ in range(num_steps):
        at = 0.98 * at + 0.06 * draw.standard_normal(world_size)
        rows.append(at)
    return np.exp(np.array(rows))


def _burst(draw: np.random.Generator, num_steps: int, world_size: int) -> np.ndarray:
    """On with 1 % a step, off with 5 %, 2.5 times slower while on."""
    on, rows = np.zeros(world_size, bool), []
    for _ in range(num_steps):
        on = np.where(on, draw.random(world_size) > 0.05, draw.random(world_size) < 0.01)
        rows.append(on)
    return np.where(np.array(rows), 2.5, 1.0)


def _diurnal(draw: np.random.Generator, num_steps: int, world_size: int) -> np.ndarray:
    """A sine of period 200 steps, own phase each."""
    phase = draw.uniform(0, 2 * np.pi, world_size)
    return 1 + 0.5 * np.sin(2 * np.pi * np.arange(num_steps)[:, np.newaxis] / 200 + phase)


def _correlated(draw: np.random.Generator, num_steps: int, world_size: int) -> np.ndarray:
    """Half of the workers share a host, 2.2 times slower now and then."""
    shared = np.cumsum(draw.random(num_steps) < 0.012) % 2
    slowness = np.ones((num_steps, world_size))
    slowness[:, : world_size // 2] = np.where(shared, 2.2, 1.0)[:, np.newaxis]
    return slowness


def _square(draw: np.random.Generator, num_steps: int, world_size: int) -> np.ndarray:
    """Square waves of period 90 steps, own phase each."""
    phase = draw.uniform(0, 2 * np.pi, world_size)
    wave = np.sin(2 * np.pi * np.arange(num_steps)[:, np.newaxis] / 90 + phase)
    return 1 + 0.4 * np.sign(wave)


_SLOWNESS = {
    "step": _step,
    "drift": _drift,
    "burst": _burst,
    "diurnal": _diurnal,
    "correlated": _correlated,
    "square": _square,
}
