"""What communication adds to a simulated step."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import FloatArray
from ..exceptions import invalid


class AbstractComm(abc.ABC):
    """Says how long a step takes, given when each worker is done computing."""

    @abc.abstractmethod
    def step_s(self, compute_s: FloatArray) -> float:
        """Return the seconds of the whole step; ``compute_s`` is ``(world_size,)``."""


@final
@dataclass(frozen=True, slots=True)
class NoComm(AbstractComm):
    """The step ends with its slowest worker: gradients cost nothing."""

    def step_s(self, compute_s: FloatArray) -> float:
        return float(compute_s.max())


@final
@dataclass(frozen=True, slots=True)
class ConstantComm(AbstractComm):
    """A reduction of fixed length once the slowest worker is done.

    Right for small models and latency-bound links. The optimum of batch sizes is the same as
    without communication.

    Args:
        seconds: length of the reduction, finite and at least 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        _check("ConstantComm", self.seconds)

    def step_s(self, compute_s: FloatArray) -> float:
        return float(compute_s.max()) + self.seconds


@final
@dataclass(frozen=True, slots=True)
class OverlappedComm(AbstractComm):
    r"""A reduction that begins while the backward still runs, bucket by bucket.

    A bucket can be reduced when every worker has its gradient, so with the slowest worker at
    $m = \max_r t_r$ and a share $h$ of the step in which gradients become ready, the reduction of
    length $s$ begins at $(1 - h) m$ and ends no earlier than the last bucket's part after $m$:
    $\max((1 - h) m + s, \; m + s / n)$, $n$ buckets.

    Args:
        seconds: length of the reduction if it ran alone, finite and at least 0.
        overlap: share $h$ of a step, at its end, during which gradients become ready, in [0, 1]:
            about two thirds, as a backward takes twice as long as a forward.
        num_buckets: at least 1.
    """

    seconds: float
    overlap: float = 2 / 3
    num_buckets: int = 8

    def __post_init__(self) -> None:
        _check("OverlappedComm", self.seconds)
        if not 0 <= self.overlap <= 1:
            remedy = "0 reduces at the end, 2/3 during the backward."
            raise invalid("OverlappedComm(overlap=...)", "be in [0, 1]", self.overlap, remedy)
        if self.num_buckets < 1:
            raise invalid(
                "OverlappedComm(num_buckets=...)", "be at least 1", self.num_buckets, "Use 1."
            )

    def step_s(self, compute_s: FloatArray) -> float:
        slowest = float(compute_s.max())
        hidden = (1 - self.overlap) * slowest + self.seconds
        return max(hidden, slowest + self.seconds / self.num_buckets)


def _check(name: str, seconds: float) -> None:
    if not (np.isfinite(seconds) and seconds >= 0):
        raise invalid(
            f"{name}(seconds=...)", "be finite and at least 0", seconds, "Measure an all-reduce."
        )
