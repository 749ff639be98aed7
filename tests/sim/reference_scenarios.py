"""The definition of the eight reference scenarios, as it was first written down. Not to be edited.

``evenstep.sim.scenario`` gives the same numbers to the last bit; a test compares the two.
"""

from __future__ import annotations

import numpy as np

NAMES = ("static", "step", "drift", "burst", "jitter", "diurnal", "correlated", "square")


# One function, however long: it is kept as it was, not as it would be written today.
def scenario(  # noqa: C901, PLR0912
    name: str, world_size: int = 8, num_steps: int = 600, seed: int = 0
):
    """Return ``intercept_s (W,)``, ``slope_s (T, W)``, ``jitter (T, W)``."""
    if name not in NAMES:
        raise ValueError(f"scenario must be one of {NAMES}, got {name!r}")
    r, w, t = np.random.default_rng(seed), world_size, num_steps
    base = 1e-3 * np.exp(r.uniform(0, np.log(4), w))  # 1 to 4 ms a sample
    intercept_s = r.uniform(2e-3, 2e-2, w)
    slope_s = np.tile(base, (t, 1))
    jitter = np.exp(0.02 * r.standard_normal((t, w)))  # 2 % on every step
    steps = np.arange(t)[:, None]
    if name == "step":  # six lasting changes, halving or doubling or tripling one worker's cost
        for _ in range(6):
            i, at = r.integers(w), r.integers(t)
            slope_s[at:, i] *= r.choice([0.5, 2.0, 3.0])
    elif name == "drift":  # Ornstein-Uhlenbeck in the logarithm, about 30 % standard deviation
        x = np.zeros(w)
        for k in range(t):
            x = 0.98 * x + 0.06 * r.standard_normal(w)
            slope_s[k] *= np.exp(x)
    elif name == "burst":  # on with 1 % a step, off with 5 %, 2.5 times slower while on
        on = np.zeros(w, bool)
        for k in range(t):
            on = np.where(on, r.random(w) > 0.05, r.random(w) < 0.01)
            slope_s[k] *= np.where(on, 2.5, 1.0)
    elif name == "jitter":  # 2 % of the single worker-steps take 1.5 to 4 times as long
        jitter *= np.where(r.random((t, w)) < 0.02, r.uniform(1.5, 4.0, (t, w)), 1.0)
    elif name == "diurnal":  # a sine of period 200 steps, own phase each
        slope_s *= 1 + 0.5 * np.sin(2 * np.pi * steps / 200 + r.uniform(0, 2 * np.pi, w))
    elif name == "correlated":  # half share a host that is 2.2 times slower now and then
        shared = np.cumsum(r.random(t) < 0.012) % 2
        slope_s[:, : w // 2] *= np.where(shared, 2.2, 1.0)[:, None]
    elif name == "square":  # square waves of period 90 steps, own phase each
        slope_s *= 1 + 0.4 * np.sign(np.sin(2 * np.pi * steps / 90 + r.uniform(0, 2 * np.pi, w)))
    return intercept_s, slope_s, jitter
