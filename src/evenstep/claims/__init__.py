"""What becomes of a plan while its step runs: it is carried out, or partly claimed."""

from ._base import AbstractScheme as AbstractScheme
from ._base import Chunk as Chunk
from ._base import Planned as Planned
from ._base import Turn as Turn
from ._schemes import Bsp as Bsp
from ._schemes import Factoring as Factoring
from ._schemes import Hybrid as Hybrid

__all__ = [
    "AbstractScheme",
    "Bsp",
    "Chunk",
    "Factoring",
    "Hybrid",
    "Planned",
    "Turn",
]
