"""What a batch costs a worker: seconds and memory against samples."""

from ._base import AbstractTimeModel as AbstractTimeModel
from ._base import bisect_batch as bisect_batch
from ._cost_model import CostEstimator as CostEstimator
from ._cubic import CubicTime as CubicTime
from ._piecewise import PiecewiseTime as PiecewiseTime
from ._profile import Profile as Profile
from ._table import TableTime as TableTime

__all__ = [
    "AbstractTimeModel",
    "CostEstimator",
    "CubicTime",
    "PiecewiseTime",
    "Profile",
    "TableTime",
    "bisect_batch",
]
