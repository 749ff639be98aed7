"""Training that others wrote, watched from outside: who waits for whom, and why.

``evenstep watch -- torchrun ... train.py``, or ``python -m evenstep.watch``. Nothing in the script
changes, and nothing in what it computes. A ``fit`` of Keras on several workers takes a callback.
"""

__all__ = ["KerasWatch"]


def __getattr__(name: str) -> object:
    """Load ``KerasWatch`` when it is asked for: other scripts import no TensorFlow."""
    if name == "KerasWatch":
        from ._keras_watch import KerasWatch

        return KerasWatch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
