"""Balanced training for PyTorch; needs the extra ``torch``."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

try:
    import torch as _torch
except ModuleNotFoundError as error:
    from .._install import install_line

    message = f"`evenstep.torch` needs PyTorch: `{install_line('torch')}`."
    raise ImportError(message) from error

from .._planner import Bounds as Bounds
from .._planner import Cost as Cost
from .._run._machine_reader import MachineReader as MachineReader
from ._balancer import Balancer as Balancer
from ._checkpoint._checkpoint import Checkpoint as Checkpoint
from ._checkpoint._checkpoint import Drain as Drain
from ._data.loaders._balanced import BalancedLoader as BalancedLoader
from ._data.order._drawing import DrawnIndices as DrawnIndices
from ._data.order._token_batches import TokenBatches as TokenBatches
from ._model._check_loss import check_loss as check_loss
from ._options import CudaMemory as CudaMemory
from ._options import MemoryReader as MemoryReader
from ._options import Runtime as Runtime

if _TYPE_CHECKING:
    from ..network._torch._network_settings import Network as Network

__all__ = [
    "BalancedLoader",
    "Balancer",
    "Bounds",
    "Checkpoint",
    "Cost",
    "CudaMemory",
    "Drain",
    "DrawnIndices",
    "MachineReader",
    "MemoryReader",
    "Network",
    "Runtime",
    "TokenBatches",
    "check_loss",
]
del _torch


def __getattr__(name: str) -> object:
    """Load ``Network`` when it is asked for: training without it imports none of its room."""
    if name == "Network":
        from ..network._torch._network_settings import Network

        return Network
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
