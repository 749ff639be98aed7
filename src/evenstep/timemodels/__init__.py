"""What a batch costs a worker: seconds and memory against samples."""

from ._base import AbstractTimeModel, Profile, bisect_batch
from ._cost_model import CostEstimator
from ._curves import CubicTime, PiecewiseTime

__all__ = [
    "AbstractTimeModel",
    "CostEstimator",
    "CubicTime",
    "PiecewiseTime",
    "Profile",
    "bisect_batch",
]
