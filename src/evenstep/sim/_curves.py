"""Workers whose times are any curve, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import FloatArray, IntArray
from ..exceptions import invalid
from ..timemodels import AbstractTimeModel
from ._workload import AbstractWorkload, jitter_of


@final
@dataclass(frozen=True, slots=True, eq=False)
class CurveWorkload(AbstractWorkload):
    r"""A time model of any shape for every step, and jitter.

    $t_{kr}(b) = m_k(b)_r \, j_{kr}$. A step in several forwards pays the full curve for each
    forward, because a model does not say which part is paid once. No worker leaves or joins.

    Args:
        times: the times of all workers, one model for every step. Give the same object again if
            nothing changes, so that an oracle plans only once.
        jitter: factors $j$, finite, positive, ``(num_steps, world_size)``; None is 1 throughout.

    Raises:
        ValueError: there is no step, or the models have different numbers of workers.
    """

    curves: tuple[AbstractTimeModel, ...]
    jitter: FloatArray

    def __init__(
        self, times: Sequence[AbstractTimeModel], jitter: FloatArray | None = None
    ) -> None:
        curves = tuple(times)
        sizes = {model.world_size for model in curves}
        if len(sizes) != 1:
            raise invalid(
                "CurveWorkload(times=...)",
                "hold a model for every step, all of as many workers",
                f"{len(curves)} steps of {sorted(sizes)} workers",
                "Give one model per step.",
            )
        shape = (len(curves), sizes.pop())
        object.__setattr__(self, "curves", curves)
        object.__setattr__(self, "jitter", jitter_of("CurveWorkload(jitter=...)", jitter, shape))

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

    def repeats(self, step: int) -> bool:
        return step > 0 and self.curves[step] is self.curves[step - 1]

    def seconds(self, step: int, batch_size: IntArray) -> FloatArray:
        times: FloatArray = self.curves[step].seconds(batch_size) * self.jitter[step]
        return times

    def chunk_s(self, step: int, worker: int, num_samples: int, *, again: bool) -> float:
        alone = np.zeros(self.world_size, np.int64)
        alone[worker] = num_samples
        return float(self.seconds(step, alone)[worker])
