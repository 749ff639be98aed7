"""Balanced training for PyTorch; needs ``pip install evenstep[torch]``."""

try:
    import torch as _torch
except ModuleNotFoundError as error:
    raise ImportError("`evenstep.torch` needs PyTorch: `pip install evenstep[torch]`.") from error

from ..control import Bounds as Bounds
from ._balancer import Balancer as Balancer
from ._loader import BalancedLoader as BalancedLoader
from ._memory import MemoryReader as MemoryReader
from ._options import Runtime as Runtime
from ._step import Step as Step

__all__ = ["BalancedLoader", "Balancer", "Bounds", "MemoryReader", "Runtime", "Step"]
del _torch
