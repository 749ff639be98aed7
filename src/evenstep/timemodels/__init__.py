"""What a batch costs a worker: seconds and memory against samples."""

from ._base import AbstractTimeModel, bisect_batch
from ._cost_model import CostEstimator
from ._cubic import CubicTime
from ._piecewise import PiecewiseTime
from ._profile import Profile
from ._table import TableTime

__all__ = [
    "AbstractTimeModel",
    "CostEstimator",
    "CubicTime",
    "PiecewiseTime",
    "Profile",
    "TableTime",
    "bisect_batch",
]
