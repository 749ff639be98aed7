"""A comparator: several steps on one's own, then the mean of all parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from evenstep.claims import AbstractScheme, Planned, Turn

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class LocalSgd(AbstractScheme[Planned]):
    r"""Ranks step alone, $H$ times, and then average their parameters.

    With ``by_speed`` the slowest takes $H$ steps and each other as many as fit meanwhile,
    $H_i = \max(1, \lfloor \tau / t_i \rfloor)$ with $\tau = H \max_i t_i$.

    Right where communication costs much, or where slow steps come singly: $H$ of them average
    out before a rank waits. Equal $H$ does nothing for workers that are always slow. It is
    another algorithm than one gradient per global batch: evenstep's promise of the same gradient
    does not hold, and unequal $H_i$ tilt the objective to the data of the fast (FedNova corrects
    that). Judge it by samples per second *and* by the loss.

    Args:
        num_local_steps: $H$, at least 1. With 1 and equal numbers it is ``Bsp`` in time.
        by_speed: whether faster ranks take more steps.

    References:
        S. Stich, *Local SGD converges fast and communicates little*, ICLR 2019; J. Wang et al.,
        *Tackling the objective inconsistency problem* (FedNova), NeurIPS 2020. The rule for
        $H_i$ is a common form, not a quotation.
    """

    moves_samples: ClassVar[bool] = False

    num_local_steps: int = 4
    by_speed: bool = field(default=False, kw_only=True)

    def local_steps(self, step_s: FloatArray) -> IntArray:
        seconds = np.asarray(step_s, np.float64)
        if not self.by_speed:
            return np.full(len(seconds), self.num_local_steps, np.int64)
        # The nudge: the slowest itself shall get H, not H - 1, whatever the last bit says.
        fitting = np.floor(self.num_local_steps * seconds.max() / seconds * (1 + 2**-50))
        steps: IntArray = np.maximum(fitting, 1).astype(np.int64)
        return steps

    def weights(self, num_local_steps: IntArray, batch_size: IntArray) -> FloatArray:
        r"""Return each rank's weight in the average, $H_i b_i / \sum_j H_j b_j$.

        Args:
            num_local_steps: steps that every rank took, ``(world_size,)``.
            batch_size: samples of each of its steps, ``(world_size,)``.
        """
        samples = num_local_steps * batch_size
        weights: FloatArray = samples / samples.sum()
        return weights

    def begin(self, batch_size: IntArray) -> Planned:
        return Planned.of(batch_size)

    def turn(self, state: Planned, rank: int, speeds: FloatArray) -> Turn[Planned]:
        chunk, after = state.take(rank)
        return Turn(chunk, after)
