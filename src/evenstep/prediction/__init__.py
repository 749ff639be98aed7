"""What a worker's steps so far say about its next one."""

from ._base import AbstractPredictor
from ._classical import Ar, Ema, Holt, LocalLevel, Seasonal, WindowMedian
from ._narx import Narx

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
