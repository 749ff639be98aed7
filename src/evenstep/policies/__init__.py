"""How many samples each worker gets: timings in, integers out."""

from ._auto import Auto as Auto
from ._base import AbstractPolicy as AbstractPolicy
from ._by_name import by_name as by_name
from ._deadband import Deadband as Deadband
from ._equal import Equal as Equal
from ._every import Every as Every
from ._fixed import Fixed as Fixed
from ._round_to import RoundTo as RoundTo
from .papers._dbs import Dbs as Dbs
from .papers._dynamic_batching import DynamicBatching as DynamicBatching
from .papers._lb_bsp_2018 import LbBsp2018 as LbBsp2018
from .papers._lb_bsp_2020 import LbBsp2020 as LbBsp2020
from .papers._lbb import Lbb as Lbb

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
    "RoundTo",
    "by_name",
]
