"""Balanced training for PyTorch; needs ``pip install evenstep[torch]``."""

try:
    import torch as _torch
except ModuleNotFoundError as error:
    raise ImportError("`evenstep.torch` needs PyTorch: `pip install evenstep[torch]`.") from error

from ..control import Bounds as Bounds
from ._balancer import Balancer as Balancer
from ._check_loss import LossCheck as LossCheck
from ._check_loss import check_loss as check_loss
from ._checkpoint import Checkpoint as Checkpoint
from ._drain import Drain as Drain
from ._eval import EvalLoader as EvalLoader
from ._loader import BalancedLoader as BalancedLoader
from ._memory import MemoryReader as MemoryReader
from ._options import Runtime as Runtime
from ._step import Step as Step
from ._stream import StreamLoader as StreamLoader

__all__ = [
    "BalancedLoader",
    "Balancer",
    "Bounds",
    "Checkpoint",
    "Drain",
    "EvalLoader",
    "LossCheck",
    "MemoryReader",
    "Runtime",
    "Step",
    "StreamLoader",
    "check_loss",
]
del _torch
