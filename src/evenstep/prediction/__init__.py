"""What a worker's steps so far say about its next one."""

from ._ar import Ar as Ar
from ._base import AbstractPredictor as AbstractPredictor
from ._ema import Ema as Ema
from ._holt import Holt as Holt
from ._local_level import LocalLevel as LocalLevel
from ._narx import Narx as Narx
from ._seasonal import Seasonal as Seasonal
from ._window_median import WindowMedian as WindowMedian

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
