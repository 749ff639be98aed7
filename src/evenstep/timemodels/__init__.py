"""What a batch costs a worker: seconds and memory against samples."""

from ._affine import AffineTime as AffineTime
from ._base import AbstractTimeModel as AbstractTimeModel
from ._base import bisect_batch as bisect_batch
from ._best_fit import BestFit as BestFit
from ._best_fit import best_fit as best_fit
from ._cluster_profile import ClusterProfile as ClusterProfile
from ._cubic import CubicTime as CubicTime
from ._fits import fit_affine as fit_affine
from ._fits import fit_cubic as fit_cubic
from ._fits import fit_piecewise as fit_piecewise
from ._fits import fit_staircase as fit_staircase
from ._joined import JoinedTime as JoinedTime
from ._memory import MemoryModel as MemoryModel
from ._piecewise import PiecewiseTime as PiecewiseTime
from ._profile import Profile as Profile
from ._staircase import StaircaseTime as StaircaseTime
from ._table import TableTime as TableTime

__all__ = [
    "AbstractTimeModel",
    "AffineTime",
    "BestFit",
    "ClusterProfile",
    "CubicTime",
    "JoinedTime",
    "MemoryModel",
    "PiecewiseTime",
    "Profile",
    "StaircaseTime",
    "TableTime",
    "best_fit",
    "bisect_batch",
    "fit_affine",
    "fit_cubic",
    "fit_piecewise",
    "fit_staircase",
]
