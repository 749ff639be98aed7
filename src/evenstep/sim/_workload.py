"""What every simulated worker needs for any batch, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._types import Cluster, FloatArray, IntArray
from ..exceptions import invalid


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    r"""Times of workers over a run: $t_{kr}(b) = (a_r + c_{kr} b) \, j_{kr}$, and 0 at $b = 0$.

    The jitter is luck that nobody can plan for; slopes may change from step to step and can, in
    principle, be foreseen. That line decides what an ``oracle`` knows.

    Args:
        intercept_s: fixed cost $a$ of a step in seconds, finite, at least 0, ``(world_size,)``.
        slope_s: cost $c$ of one sample in seconds, finite, positive, ``(num_steps, world_size)``.
        jitter: factors $j$, finite, positive, likewise; None is 1 throughout.

    Raises:
        ValueError: an argument has another shape or is out of range; the message names the first
            step and worker.
    """

    intercept_s: FloatArray
    slope_s: FloatArray
    jitter: FloatArray | None = None

    def __post_init__(self) -> None:
        intercept = np.array(self.intercept_s, np.float64)
        slope = np.array(self.slope_s, np.float64)
        if intercept.ndim != 1 or not intercept.size:
            _refuse("intercept_s", "have shape (world_size,)", intercept.shape)
        if slope.ndim != 2 or slope.shape[1] != len(intercept) or not len(slope):
            _refuse("slope_s", f"have shape (num_steps, {len(intercept)})", slope.shape)
        _check_values("intercept_s", intercept, intercept >= 0, "at least 0")
        _check_values("slope_s", slope, slope > 0, "positive")
        jitter = np.ones_like(slope) if self.jitter is None else np.array(self.jitter, np.float64)
        if jitter.shape != slope.shape:
            _refuse("jitter", f"have the shape {slope.shape} of `slope_s`", jitter.shape)
        _check_values("jitter", jitter, jitter > 0, "positive")
        for name, value in (("intercept_s", intercept), ("slope_s", slope), ("jitter", jitter)):
            value.flags.writeable = False
            object.__setattr__(self, name, value)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return int(self.slope_s.shape[1])

    @property
    def num_steps(self) -> int:
        """Steps for which times are given."""
        return len(self.slope_s)

    def seconds(self, step: int, batch_size: IntArray) -> FloatArray:
        """Return what every worker needs in ``step`` for its samples, ``(world_size,)``."""
        assert self.jitter is not None
        line = (self.intercept_s + self.slope_s[step] * batch_size) * self.jitter[step]
        times: FloatArray = np.where(batch_size > 0, line, 0.0)
        return times

    def check(self, cluster: Cluster) -> None:
        """Raise unless ``cluster`` has as many workers."""
        if cluster.world_size != self.world_size:
            raise invalid(
                "sim.run(cluster=...)",
                f"have the {self.world_size} workers of `intercept_s`",
                cluster.world_size,
                "Give one column of times per worker.",
            )


def _refuse(name: str, rule: str, value: object) -> None:
    raise invalid(f"Workload({name}=...)", rule, value, "Give times by step and worker.")


def _check_values(name: str, value: FloatArray, good: np.ndarray, rule: str) -> None:
    valid = good & np.isfinite(value)
    if valid.all():
        return
    where = tuple(int(index) for index in np.argwhere(~valid)[0])
    place = f"worker {where[-1]}" + (f" in step {where[0]}" if len(where) == 2 else "")
    raise invalid(
        f"Workload({name}=...)",
        f"be finite and {rule}",
        f"{value[where]} for {place}",
        "Leave out steps that were not measured.",
    )
