"""Balanced training under Accelerate and Hugging Face's `Trainer`.

Needs the extra ``huggingface``. Importing it imports neither of the two: it works on
the objects that are given to it.
"""

from ._accelerate import balance
from ._trainer import BalancedMixin

__all__ = ["BalancedMixin", "balance"]
