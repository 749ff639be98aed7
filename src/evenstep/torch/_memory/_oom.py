"""Running out of memory: told from other errors, and what a failed forward held given back."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable

import torch

_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "status_alloc_failed",  # of cuBLAS and cuDNN, which find no room for what they work with
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether ``error`` says that memory, the device's or the host's, ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def attempt(call: Callable[[], object], *, survives: bool = True) -> Exception | None:
    """Make ``call``; return the error if memory ran out, and have its frames hold nothing.

    Args:
        call: may run out of memory.
        survives: whether it may be made again; if not, the error is raised as any other.
    """
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        if not (survives and is_out_of_memory(error)):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold what filled the memory
        return error.with_traceback(None)
    return None


def free_memory() -> None:
    """Give back what the failed forward held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
