"""What becomes of a plan while its step runs: it is carried out, or partly claimed."""

from ._schemes import AbstractScheme as AbstractScheme
from ._schemes import Bsp as Bsp
from ._schemes import Chunk as Chunk
from ._schemes import Factoring as Factoring
from ._schemes import Hybrid as Hybrid
from ._schemes import Planned as Planned
from ._schemes import Turn as Turn

__all__ = [
    "AbstractScheme",
    "Bsp",
    "Chunk",
    "Factoring",
    "Hybrid",
    "Planned",
    "Turn",
]
