"""Balanced training for TensorFlow and Keras; needs ``pip install evenstep[tensorflow]``."""

try:
    import tensorflow as _tensorflow
except ModuleNotFoundError as error:
    raise ImportError(
        "`evenstep.tensorflow` needs TensorFlow: `pip install evenstep[tensorflow]`."
    ) from error

from ..control import Bounds as Bounds
from ._balancer import Balancer as Balancer
from ._callback import BalancerCallback as BalancerCallback
from ._options import Runtime as Runtime

__all__ = ["Balancer", "BalancerCallback", "Bounds", "Runtime"]
del _tensorflow
