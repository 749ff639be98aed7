"""How many samples each worker gets: timings in, integers out."""

from ._auto import Auto
from ._base import AbstractPolicy
from ._by_name import by_name
from ._simple import Deadband, Equal, Every, Fixed
from .papers._dbs import Dbs
from .papers._dynamic_batching import DynamicBatching
from .papers._lb_bsp import LbBsp2018, LbBsp2020
from .papers._lbb import Lbb

__all__ = [
    "AbstractPolicy",
    "Auto",
    "Dbs",
    "Deadband",
    "DynamicBatching",
    "Equal",
    "Every",
    "Fixed",
    "LbBsp2018",
    "LbBsp2020",
    "Lbb",
    "by_name",
]
