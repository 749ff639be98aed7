"""What a worker's steps so far say about its next one."""

from ._ar import Ar
from ._base import AbstractPredictor
from ._level_predictors import Ema, Holt, LocalLevel, WindowMedian
from ._narx import Narx
from ._seasonal import Seasonal

__all__ = [
    "AbstractPredictor",
    "Ar",
    "Ema",
    "Holt",
    "LocalLevel",
    "Narx",
    "Seasonal",
    "WindowMedian",
]
