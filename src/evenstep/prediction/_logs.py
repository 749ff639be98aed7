"""Logarithms of positive values, and the way back."""

from __future__ import annotations

import numpy as np

from .._types import FloatArray

LARGEST = 700.0
"""Past this a float's exponential is infinite, or close to the smallest there is."""


def positive(logs: FloatArray) -> FloatArray:
    """Return the exponentials, positive and finite whatever was extrapolated; NaN stays."""
    values: FloatArray = np.exp(np.clip(logs, -LARGEST, LARGEST))
    return values
