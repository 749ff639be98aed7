"""What a batch costs a worker: seconds and memory against samples."""

from ._affine import AffineTime as AffineTime
from ._base import AbstractTimeModel as AbstractTimeModel
from ._base import bisect_batch as bisect_batch
from ._best_fit import BestFit as BestFit
from ._cluster_profile import ClusterProfile as ClusterProfile
from ._cost_estimator import CostEstimator as CostEstimator
from ._cost_model import CostModel as CostModel
from ._cost_model import fit_costs as fit_costs
from ._cubic import CubicTime as CubicTime
from ._memory_model import MemoryModel as MemoryModel
from ._piecewise import PiecewiseTime as PiecewiseTime
from ._profile import Profile as Profile
from ._table import TableTime as TableTime

__all__ = [
    "AbstractTimeModel",
    "AffineTime",
    "BestFit",
    "ClusterProfile",
    "CostEstimator",
    "CostModel",
    "CubicTime",
    "MemoryModel",
    "PiecewiseTime",
    "Profile",
    "TableTime",
    "bisect_batch",
    "fit_costs",
]
