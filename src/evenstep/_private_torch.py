"""What evenstep relies on of PyTorch that is private there, for all rooms that import it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have the autograd engine call ``callback`` when the backward under way is done.

    From inside a callback as well: the engine goes on to those added meanwhile. The attribute path
    is private to torch and the same since 1.0; a test holds it for the pinned version.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
