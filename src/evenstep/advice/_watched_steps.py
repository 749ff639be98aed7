"""What was seen of steps that training took with the user's own split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self, final

import numpy as np
from numpy.typing import ArrayLike

from .._diagnosis import Phase
from .._types import FloatArray
from ..exceptions import invalid

OWN_S: Final = 0.0004
"""Of the training thread, for each step with a Balancer."""
_OWN = (Phase.INPUT, Phase.OPTIMIZER, Phase.EVALUATION, Phase.CHECKPOINT, Phase.REST)
_LEAST_SHARE = 0.1  # of computing, for a phase that tells something
_ONE_FACTOR = 1.25  # by which ratios of forward to backward differ at most


@final
@dataclass(frozen=True, slots=True, eq=False)
class WatchedSteps:
    """Times and batches of all ranks in steps whose split was the user's own.

    Attributes:
        wall_s: seconds of each step, ``(num_steps,)``.
        compute_s: own forward and backward of each rank, without waiting for others,
            ``(num_steps, world_size)``, positive.
        other_s: a rank's other own time, which its number of samples does not change: input,
            optimizer, the rest of the loop; likewise.
        num_samples: of each rank's batch; likewise, 0 where that is not known.
        size: numbers or tokens in it; likewise.
        is_slow_throughout: whether forward and backward of slow ranks are slower by one factor, as
            with a slow device. Then so is what a step costs before its first sample.
        own_s: what a balanced step takes beside: evenstep's own time and what further forwards meet
            for, less what its loader spares.
    """

    wall_s: FloatArray
    compute_s: FloatArray
    other_s: FloatArray
    num_samples: FloatArray
    size: FloatArray
    is_slow_throughout: bool = False
    own_s: float = OWN_S

    def __post_init__(self) -> None:
        shape = np.shape(self.compute_s)
        for name in ("wall_s", "compute_s", "other_s", "num_samples", "size"):
            array = np.asarray(getattr(self, name), np.float64)
            wanted = shape[:1] if name == "wall_s" else shape
            if len(shape) != 2 or array.shape != wanted:
                raise invalid(
                    f"WatchedSteps({name}=...)",
                    f"have the shape {wanted}",
                    array.shape,
                    "Give one row for each step, and one number in it for each rank.",
                )
            object.__setattr__(self, name, array)

    @classmethod
    def of(
        cls,
        spent_us: ArrayLike,
        *,
        num_steps: ArrayLike = 1,
        num_samples: ArrayLike = 0,
        size: ArrayLike = 0,
        own_s: float = OWN_S,
    ) -> Self:
        """Return what times by phase say of steps.

        Evaluation and checkpoints count as a rank's other time. Of short steps that were summed up
        in one row, their mean counts as a step.

        Args:
            spent_us: as ``time_by_phase`` gives them, ``(num_rows, world_size, len(Phase))``.
            num_steps: how many steps each row is the sum of, ``(num_rows,)``.
            num_samples: of each rank's batch, ``(num_rows, world_size)``; 0 where not known.
            size: numbers or tokens in it; likewise.
            own_s: what a balanced step takes beside.
        """
        spent_s = np.asarray(spent_us, np.float64) / 1e6
        each = np.broadcast_to(num_steps, spent_s.shape[:1])[:, None]
        spent_s = spent_s / each[..., None]
        forward_s, backward_s = spent_s[..., Phase.FORWARD], spent_s[..., Phase.BACKWARD]
        compute_s = forward_s + backward_s
        return cls(
            wall_s=spent_s.sum(axis=2).mean(axis=1),
            compute_s=np.maximum(compute_s, 1e-6),
            other_s=spent_s[..., _OWN].sum(axis=2),
            num_samples=np.broadcast_to(num_samples, compute_s.shape) / each,
            size=np.broadcast_to(size, compute_s.shape) / each,
            is_slow_throughout=_alike(forward_s, backward_s),
            own_s=own_s,
        )

    @property
    def num_steps(self) -> int:
        """How many there are."""
        return len(self.wall_s)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.compute_s.shape[1])

    def since(self, first: int) -> WatchedSteps:
        """Return those from the step at this place on."""
        return WatchedSteps(
            self.wall_s[first:],
            self.compute_s[first:],
            self.other_s[first:],
            self.num_samples[first:],
            self.size[first:],
            self.is_slow_throughout,
            self.own_s,
        )


def _alike(forward_s: FloatArray, backward_s: FloatArray) -> bool:
    """Return whether the forward has one share of computing on all ranks, neither all nor none."""
    forward, backward = np.median(forward_s, axis=0), np.median(backward_s, axis=0)
    share = forward / np.maximum(forward + backward, 1e-9)
    return bool(share.min() > _LEAST_SHARE and share.max() < 1 - _LEAST_SHARE) and bool(
        np.ptp(np.log(share / (1 - share))) < np.log(_ONE_FACTOR)
    )
