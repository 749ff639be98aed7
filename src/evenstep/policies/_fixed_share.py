"""Weights of experts that follow those that were right of late."""

from __future__ import annotations

import numpy as np

from .._types import FloatArray


def fixed_share(
    weights: FloatArray, losses: FloatArray, *, rate: float, share: float, prior: FloatArray
) -> FloatArray:
    r"""Return the weights after one more round.

    $w_e \gets (1 - \alpha) w_e e^{-\eta \ell_e} / \sum_f w_f e^{-\eta \ell_f} + \alpha p_e$. A
    number added to all losses changes nothing.

    Args:
        weights: $w$, positive, adding up to 1, ``(num_experts,)``.
        losses: $\ell$, ``(num_experts,)``.
        rate: $\eta$, positive.
        share: $\alpha$, in [0, 1).
        prior: $p$, as ``weights``.
    """
    grown = weights * np.exp(-rate * (losses - losses.min()))
    mixed: FloatArray = (1 - share) * grown / grown.sum() + share * prior
    return mixed
