"""Balanced training for TensorFlow and Keras; needs the extra ``tensorflow``."""

try:
    import tensorflow as _tensorflow
except ModuleNotFoundError as error:
    from .._install import install_line

    message = f"`evenstep.tensorflow` needs TensorFlow: `{install_line('tensorflow')}`."
    raise ImportError(message) from error

from .._planner import Bounds
from ._keras_session import Runtime
from ._strategy_balancer import Balancer

__all__ = ["Balancer", "Bounds", "Runtime"]
del _tensorflow
