"""The times of simulated workers for any batch, step by step, and which workers are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray
from ..exceptions import invalid
from ..timemodels import AbstractTimeModel
from ..timemodels._curves import AffineTime

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    r"""Straight lines, flat up to saturation if a device has to fill up, and jitter.

    Workers are numbered through the whole run. In a step only its members take part, and they have
    ranks in that order. An ``oracle`` plans by the times without jitter.

    $t_{kr}(b) = (a_r + c_{kr} \max(b, s_r)) \, j_{kr}$, and 0 at $b = 0$. A step in several
    forwards pays $a_r$ once, and each forward costs $c_{kr} \max(n, s_r)$.

    No plan can predict the jitter. Slopes may change from step to step, and can be predicted in
    principle.

    Args:
        intercept_s: fixed cost $a$ of a step in seconds, finite, at least 0, ``(world_size,)``.
        slope_s: cost $c$ of one sample in seconds, finite, positive, ``(num_steps, world_size)``.
        jitter: factors $j$, finite, positive, likewise; None is 1 throughout.
        saturation: samples $s$ up to which any batch takes the same time, integers of at least 0,
            ``(world_size,)``; None is 0, a line all the way.
        presence: whether a worker takes part, ``(num_steps, world_size)``, at least one in every
            step; None is always.

    Raises:
        ValueError: an argument has another shape or is out of range; the message names the first
            step and worker.
    """

    intercept_s: FloatArray
    slope_s: FloatArray
    jitter: FloatArray | None = None
    saturation: IntArray | None = None
    presence: BoolArray | None = None

    def __post_init__(self) -> None:
        intercept = np.array(self.intercept_s, np.float64)
        slope = np.array(self.slope_s, np.float64)
        if intercept.ndim != 1 or not intercept.size:
            _refuse("intercept_s", "have shape (world_size,)", intercept.shape)
        if slope.ndim != 2 or slope.shape[1] != len(intercept) or not len(slope):
            _refuse("slope_s", f"have shape (num_steps, {len(intercept)})", slope.shape)
        check_values("Workload(intercept_s=...)", intercept, intercept >= 0, "at least 0")
        check_values("Workload(slope_s=...)", slope, slope > 0, "positive")
        jitter = jitter_of("Workload(jitter=...)", self.jitter, slope.shape)
        fields = {"intercept_s": intercept, "slope_s": slope, "jitter": jitter}
        fields["saturation"] = _saturation(self.saturation, intercept.shape)
        fields["presence"] = _presence(self.presence, slope.shape)
        for name, value in fields.items():
            value.flags.writeable = False
            object.__setattr__(self, name, value)

    @property
    def world_size(self) -> int:
        """Number of workers over the whole run."""
        return int(self.slope_s.shape[1])

    @property
    def num_steps(self) -> int:
        """Steps for which times are given."""
        return len(self.slope_s)

    def members(self, step: int) -> IntArray:
        """Return the workers that take part in ``step``, ascending, at least one."""
        assert self.presence is not None
        return np.flatnonzero(self.presence[step])

    def times(self, step: int) -> AbstractTimeModel:
        """Return the times of the members in ``step``, without jitter."""
        assert self.saturation is not None
        here = self.members(step)
        line = AffineTime(self.intercept_s[here], self.slope_s[step, here])
        flat = self.saturation[here]
        return SaturatedTime(line, flat) if (flat > 1).any() else line

    def seconds(self, step: int, batch_size: IntArray) -> FloatArray:
        """Return the time of every worker in ``step`` for its samples, both ``(world_size,)``."""
        assert self.jitter is not None
        assert self.saturation is not None
        counted = np.maximum(batch_size, self.saturation)
        line = (self.intercept_s + self.slope_s[step] * counted) * self.jitter[step]
        times: FloatArray = np.where(batch_size > 0, line, 0.0)
        return times

    def chunk_s(self, step: int, worker: int, num_samples: int, *, again: bool) -> float:
        """Return the time of one worker for a part of its samples.

        Args:
            step: the step.
            worker: the worker's number.
            num_samples: samples of this forward, at least 1.
            again: whether it has computed others in this step.
        """
        assert self.jitter is not None
        assert self.saturation is not None
        counted = max(num_samples, int(self.saturation[worker]))
        fixed_s = 0.0 if again else float(self.intercept_s[worker])
        seconds = fixed_s + float(self.slope_s[step, worker]) * counted
        return seconds * float(self.jitter[step, worker])


def jitter_of(name: str, value: FloatArray | None, shape: tuple[int, ...]) -> FloatArray:
    """Return checked factors of ``shape``; ones where none are given."""
    jitter = np.ones(shape) if value is None else np.array(value, np.float64)
    if jitter.shape != shape:
        remedy = "Give one factor per step and worker."
        raise invalid(name, f"have the shape {shape} of the times", jitter.shape, remedy)
    check_values(name, jitter, jitter > 0, "positive")
    return jitter


def check_values(name: str, value: FloatArray, good: BoolArray, rule: str) -> None:
    """Raise, with the first step and worker, unless all is finite and ``good``."""
    valid = good & np.isfinite(value)
    if valid.all():
        return
    where = tuple(int(index) for index in np.argwhere(~valid)[0])
    place = f"worker {where[-1]}" + (f" in step {where[0]}" if len(where) == 2 else "")
    remedy = "Leave out steps that were not measured."
    raise invalid(name, f"be finite and {rule}", f"{value[where]} for {place}", remedy)


def _saturation(value: IntArray | None, shape: tuple[int, ...]) -> NDArray[Any]:
    samples = np.zeros(shape, np.int64) if value is None else np.array(value)
    if samples.shape != shape or samples.dtype.kind not in "iu" or (samples < 0).any():
        _refuse("saturation", f"be {shape[0]} integers >= 0", value)
    return samples


def _presence(value: BoolArray | None, shape: tuple[int, ...]) -> NDArray[Any]:
    presence = np.ones(shape, np.bool_) if value is None else np.array(value)
    if presence.shape != shape or presence.dtype != np.bool_:
        _refuse("presence", f"be booleans of the shape {shape} of `slope_s`", presence.shape)
    empty = ~presence.any(axis=1)
    if empty.any():
        _refuse("presence", "hold a worker in every step", f"none in step {int(empty.argmax())}")
    return presence


def _refuse(name: str, rule: str, value: object) -> None:
    raise invalid(f"Workload({name}=...)", rule, value, "Give times by step and worker.")


@final
@dataclass(frozen=True, slots=True, eq=False)
class SaturatedTime(AbstractTimeModel):
    r"""$t_r(b) = a_r + c_r \max(b, s_r)$ for $b \ge 1$, and 0 at 0.

    Right for a GPU that takes about the same time for any batch that does not fill it. Real ones
    bend gently where this has a corner, and go in stairs past it.

    Args:
        line: $a$ and $c$.
        saturation: $s$, the samples that fill each device, at least 0, ``(world_size,)``.

    References:
        The curve of GPUs in arXiv 1806.02508 (LB-BSP), flat and then linear.
    """

    line: AffineTime
    saturation: IntArray

    @property
    def world_size(self) -> int:
        return self.line.world_size

    def seconds(self, batch_size: IntArray) -> FloatArray:
        times: FloatArray = self.line.seconds(np.maximum(batch_size, self.saturation))
        return times * (batch_size > 0)

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        # A worker that cannot afford a full device cannot afford one sample either.
        batch = self.line.largest_batch(budget_s, np.maximum(most, self.saturation))
        full = np.maximum(self.saturation, 1)
        return np.where(batch >= full, np.minimum(batch, most), 0)


@final
class CurveWorkload:
    r"""A time model of any shape for every step, and jitter.

    $t_{kr}(b) = m_k(b)_r \, j_{kr}$. A step in several forwards pays the full curve for each
    forward, because a model does not say which part is paid once. No worker leaves or joins. All
    else is as in ``Workload``.

    Args:
        times: the times of all workers, one model for every step.
        jitter: factors $j$, finite, positive, ``(num_steps, world_size)``; None is 1 throughout.

    Raises:
        ValueError: there is no step, or the models have different numbers of workers.
    """

    def __init__(
        self, times: Sequence[AbstractTimeModel], jitter: FloatArray | None = None
    ) -> None:
        self.curves = tuple(times)
        sizes = {model.world_size for model in self.curves}
        if len(sizes) != 1:
            raise invalid(
                "CurveWorkload(times=...)",
                "hold a model for every step, all of as many workers",
                f"{len(self.curves)} steps of {sorted(sizes)} workers",
                "Give one model per step.",
            )
        shape = (len(self.curves), sizes.pop())
        self.jitter = jitter_of("CurveWorkload(jitter=...)", jitter, shape)

    @property
    def world_size(self) -> int:
        return self.curves[0].world_size

    @property
    def num_steps(self) -> int:
        return len(self.curves)

    def members(self, step: int) -> IntArray:
        return np.arange(self.world_size)

    def times(self, step: int) -> AbstractTimeModel:
        return self.curves[step]

    def seconds(self, step: int, batch_size: IntArray) -> FloatArray:
        times: FloatArray = self.curves[step].seconds(batch_size) * self.jitter[step]
        return times

    def chunk_s(self, step: int, worker: int, num_samples: int, *, again: bool) -> float:
        alone = np.zeros(self.world_size, np.int64)
        alone[worker] = num_samples
        return float(self.seconds(step, alone)[worker])


AnyWorkload = Workload | CurveWorkload
"""Times of workers over a run."""
