"""How many of a step's remaining samples a rank claims."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._types import FloatArray
from ..exceptions import invalid


@dataclass(frozen=True, slots=True)
class Factoring:
    r"""Claims in proportion to speed, which become smaller as samples run out.

    A claim is $\max(m, \lfloor f R \, v_i / \sum_j v_j \rfloor)$ of the $R$ samples left, with
    speeds $v$. Early claims are large, so there are few; late ones are small, so all ranks end
    together. If a rank would need longer for one sample than the fastest rank for all the rest, it
    claims none.

    Right if speeds are approximately known and claims are cheap: $W$ equal ranks share out $R$
    samples in about $W (1 + \ln(f R / W)) / f$ claims. Wrong if a claim costs as much as several
    samples: raise ``smallest``.

    Args:
        share: $f$, the part of the rest that one round of claims shares out, in (0, 1]. 1 trusts
            the speeds.
        smallest: $m$, least samples of a claim, at least 1.

    Raises:
        ValueError: an argument is out of range.

    References:
        S. Hummel, J. Schmidt, R. Uma and J. Wein, *Load-sharing in heterogeneous systems via
        weighted factoring*, SPAA 1996; C. Polychronopoulos and D. Kuck, *Guided
        self-scheduling*, 1987, is $f = 1$ with equal speeds. The rank that claims none is ours.
    """

    share: float = 0.8
    smallest: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            remedy = "0.8 keeps a fifth for surprises."
            raise invalid("Factoring(share=...)", "be in (0, 1]", self.share, remedy)
        if type(self.smallest) is not int or self.smallest < 1:
            raise invalid(
                "Factoring(smallest=...)", "be an integer >= 1", repr(self.smallest), "Use 1."
            )

    def next_claim(self, remaining: int, speeds: FloatArray, rank: int) -> int:
        """Return how many samples ``rank`` claims now; 0 if it leaves the rest to others.

        The fastest of ``speeds`` never leaves anything, so one rank always ends the step. A rank
        that claimed 0 stays out of the step: put its speed at 0 for later claims.

        Args:
            remaining: samples that are not claimed, at least 0.
            speeds: samples per second of every rank, 0 for one that stays out,
                ``(world_size,)``. Only ratios matter.
            rank: who claims.

        Raises:
            ValueError: ``remaining`` is negative; a speed is negative, or not finite, or all are 0.
        """
        if remaining < 0:
            raise invalid(
                "Factoring.next_claim(remaining=...)",
                "be at least 0",
                remaining,
                "Stop at the end of the step.",
            )
        fastest, total = float(speeds.max()), float(speeds.sum())
        if not (fastest > 0 and np.isfinite(total) and speeds.min() >= 0):
            raise invalid(
                "Factoring.next_claim(speeds=...)",
                "be finite, at least 0 and not all 0",
                speeds,
                "Use ones as long as nothing was measured.",
            )
        speed = float(speeds[rank])
        if not remaining or speed * remaining < fastest:
            return 0
        return min(remaining, max(self.smallest, int(self.share * remaining * speed / total)))
