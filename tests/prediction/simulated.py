"""Series to foresee, with what explains them; `python -m` prints their errors.

The constants of the predictors were chosen on seeds from 1000 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep import Resources
from evenstep.prediction import Ar, Ema, Holt, LocalLevel, Narx, WindowMedian

FIRST = 200
"""Steps after which forecasts count."""


@dataclass(frozen=True, eq=False)
class Series:
    """Values, ``(num_steps, world_size)``, and what is free for each step, known before it.

    Where a step is odd nobody can foresee it, and only the forecasts of the others are compared.
    """

    values: np.ndarray
    odd: np.ndarray
    free_cpu: np.ndarray
    free_memory_bytes: np.ndarray

    def resources(self, step):
        """What is known at the end of a step."""
        return Resources(self.free_cpu[step + 1], self.free_memory_bytes[step + 1])


def restless(rng, shape, *, persistence=0.9):
    """Shares in (0, 1) that wander and come back to their mean."""
    state = np.zeros(shape)
    for step in range(1, shape[0]):
        luck = rng.standard_normal(shape[1])
        state[step] = persistence * state[step - 1] + np.sqrt(1 - persistence**2) * luck
    return 1 / (1 + np.exp(-1.5 * state - 0.5))


def come_and_go(rng, shape):
    """Shares of 0.95 or 0.4, as a neighbour's job comes and goes every twenty steps, with noise."""
    toggles = rng.random(shape) < 0.05
    busy = (np.cumsum(toggles, axis=0) + rng.integers(0, 2, shape[1])) % 2
    return np.clip(np.where(busy, 0.4, 0.95) + 0.03 * rng.standard_normal(shape), 0, 1)


def series(kind, seed, *, num_steps=500, world_size=8):
    """Return one of the kinds of `FACTORS`, of workers of unlike speeds with 3 % jitter."""
    rng, shape = np.random.default_rng(seed), (num_steps, world_size)
    speed = rng.lognormal(4, 0.7, world_size) * np.exp(0.03 * rng.standard_normal(shape))
    cpu, memory = restless(rng, shape), restless(rng, shape, persistence=0.98)
    if kind == "neighbours":
        cpu = come_and_go(rng, shape)
    if kind == "short of memory":
        memory = come_and_go(rng, shape)
    step = np.arange(num_steps)[:, np.newaxis] + rng.integers(0, 200, world_size)
    values = speed * FACTORS[kind](rng, shape, step, cpu, memory)
    odd = (rng.random(shape) < 0.02) & (kind == "odd steps")
    return Series(np.where(odd, 0.3 * values, values), odd, cpu, (16e9 * memory).astype(np.int64))


def wandering(rng, shape, step, cpu, memory):
    """A random walk by 3 % a step, which nothing explains."""
    return np.exp(0.03 * np.cumsum(rng.standard_normal(shape), axis=0))


def jumping(rng, shape, step, cpu, memory):
    """Lasting changes by about 2x, one in a hundred steps."""
    jumps = 0.7 * rng.standard_normal(shape) * (rng.random(shape) < 0.01)
    return np.exp(np.cumsum(jumps, axis=0))


FACTORS = {
    "steady": lambda rng, shape, step, cpu, memory: np.ones(shape),
    "odd steps": lambda rng, shape, step, cpu, memory: np.ones(shape),
    "wandering": wandering,
    "lasting changes": jumping,
    "drift": lambda rng, shape, step, cpu, memory: np.exp(0.5 * np.sin(2 * np.pi * step / 200)),
    "cycle": lambda rng, shape, step, cpu, memory: np.exp(0.3 * np.sin(2 * np.pi * step / 20)),
    "neighbours": lambda rng, shape, step, cpu, memory: 0.15 + 0.85 * cpu,
    "restless load": lambda rng, shape, step, cpu, memory: np.minimum(1, 0.2 + 1.6 * cpu),
    "short of memory": lambda rng, shape, step, cpu, memory: np.where(memory < 0.6, 0.4, 1.0),
}
"""What speeds are multiplied by, given what is free; the last three are explained by it."""


def foresee(predictor, given, *, told=True):
    """Return the forecasts of the steps from the second on, and who decided by itself."""
    state, forecasts, own = predictor.init(given.values.shape[1]), [], []
    for step, values in enumerate(given.values[:-1]):
        resources = given.resources(step) if told else None
        state = predictor.update(state, values, resources)
        forecasts.append(predictor.predict(state))
        own.append(predictor.decides(state) if isinstance(predictor, Narx) else forecasts[-1] < 0)
    return np.array(forecasts), np.array(own)


def rmse(predictor, given, *, told=True, first=FIRST):
    """Return the root mean squared relative error of the forecasts from step ``first`` on."""
    forecasts, _ = foresee(predictor, given, told=told)
    off = forecasts[first:] / given.values[first + 1 :] - 1
    return float(np.sqrt((off[~given.odd[first + 1 :]] ** 2).mean()))


def main():
    """Print the error of the average, and those of the others as multiples of it."""
    others = [Ema(1.0), WindowMedian(), Holt(), LocalLevel(), Ar(), Narx()]
    print(*["| series", "`ema`", *(f"`{each.name}`" for each in others)], sep=" | ", end=" |\n")
    for kind in FACTORS:
        runs = [series(kind, seed) for seed in range(4)]
        base = np.mean([rmse(Ema(), run) for run in runs])
        ratios = [np.mean([rmse(each, run) for run in runs]) / base for each in others]
        print(f"| {kind} | {base:.1%} |", " | ".join(f"{ratio:.2f}" for ratio in ratios), "|")


if __name__ == "__main__":
    main()
