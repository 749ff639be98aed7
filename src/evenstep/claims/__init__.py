"""What becomes of a plan while its step runs: it is carried out, or partly claimed."""

from ._schemes import AbstractScheme, Bsp, Chunk, Factoring, Hybrid, Planned, Turn

__all__ = [
    "AbstractScheme",
    "Bsp",
    "Chunk",
    "Factoring",
    "Hybrid",
    "Planned",
    "Turn",
]
