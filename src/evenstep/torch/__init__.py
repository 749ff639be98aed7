"""Balanced training for PyTorch; needs ``pip install evenstep[torch]``."""

try:
    import torch as _torch
except ModuleNotFoundError as error:
    raise ImportError("`evenstep.torch` needs PyTorch: `pip install evenstep[torch]`.") from error

from ..control import Bounds as Bounds
from ._balancer import Balancer as Balancer
from ._memory import MemoryReader as MemoryReader
from ._options import Runtime as Runtime

__all__ = ["Balancer", "Bounds", "MemoryReader", "Runtime"]
del _torch
