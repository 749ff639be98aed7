"""The end of own backward where backwards run inside others: reentrant activation checkpointing.

There DDP's last bucket becomes ready in an inner backward and is waited for at that one's end,
so the callback at the end of the outer backward comes after the wait: 0.155 s were read for a true
0.001. When the last parameter gets its gradient, the wait has not begun.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..._private_torch import backward_number
from .._step._conductor import StepConductor
from ._weighting import Backward


class NestedBackwards:
    """Finds out whether a model nests backwards, and if so notes when each gradient is ready.

    A hook on every parameter costs time, so they go after a look in which the engine ran no
    backward inside another.

    Args:
        module: the model.
        backward: knows which backward is the outer one.
        steps: have a meter while one is under way.

    Attributes:
        found: whether backwards were nested so far.
    """

    def __init__(self, module: nn.Module, backward: Backward, steps: StepConductor) -> None:
        self._module = module
        self._backward = backward
        self._steps = steps
        self._handles: list[Any] = []
        self.found = False

    def begin(self) -> None:
        """Put the hooks on."""
        if not self._handles:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
                for parameter in self._module.parameters()
                if parameter.requires_grad
            ]

    def end(self) -> None:
        """Take them off if there was nothing to find."""
        if not self.found:
            self.release()

    def release(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _ready(self, parameter: torch.Tensor) -> None:
        outer = self._backward.task
        if outer is None:
            return
        self.found |= outer != backward_number()
        if self.found and (recorder := self._steps.open_recorder) is not None:
            recorder.grad_ready()
