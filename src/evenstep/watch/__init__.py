"""Training that others wrote, watched from outside: who waits for whom, and why.

``evenstep watch -- torchrun ... train.py``, or ``python -m evenstep.watch``. Nothing in the script
changes, and nothing in what it computes. A ``fit`` of Keras on several workers takes a callback.
"""

__all__ = ["KerasWatch"]


def __getattr__(name: str) -> object:
    """Load ``KerasWatch`` when it is asked for: other scripts import no TensorFlow."""
    if name == "KerasWatch":
        try:
            from ._keras_watch import KerasWatch
        except ModuleNotFoundError as error:
            if error.name != "tensorflow":
                raise
            from .._install import install_line

            message = f"`KerasWatch` needs TensorFlow: `{install_line('tensorflow')}`."
            raise ImportError(message) from error
        return KerasWatch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
