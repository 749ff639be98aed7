"""Whether memory ran out, and how to get back what a failed forward held."""

from __future__ import annotations

import gc

import torch

_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether ``error`` says that memory, the device's or the host's, ran out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def free_memory() -> None:
    """Give back what the failed forward held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
