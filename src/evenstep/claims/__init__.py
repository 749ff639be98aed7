"""What becomes of a plan while its step runs: it is carried out, or partly claimed."""

from ._base import AbstractScheme as AbstractScheme
from ._base import Chunk as Chunk
from ._base import Planned as Planned
from ._base import Turn as Turn
from ._bsp import Bsp as Bsp
from ._factoring import Factoring as Factoring
from ._hybrid import Hybrid as Hybrid

__all__ = [
    "AbstractScheme",
    "Bsp",
    "Chunk",
    "Factoring",
    "Hybrid",
    "Planned",
    "Turn",
]
