"""The end of own backward where backwards run inside others: reentrant activation checkpointing.

There DDP's last bucket becomes ready in an inner backward and is waited for at that one's end,
so the callback at the end of the outer backward comes after the wait: 0.155 s were read for a true
0.001. When the last parameter gets its gradient, the wait has not begun.
"""

from __future__ import annotations

import torch
from torch import nn

from ..._private_torch import at_end_of_backward, backward_number
from .._step._conductor import StepConductor
from ._weighting import Backward

_TRIAL = 3  # backwards after which a model that nests none is believed never to do so


class NestedBackwards:
    """Finds out whether a model nests backwards, and if so notes when each gradient is ready.

    A hook on every parameter costs time, so they go after a few backwards in which the engine ran
    none inside another. Checkpointing that is switched on later than that is not noticed.

    Args:
        module: the model.
        backward: knows which backward is the outer one.
        steps: have a meter while one is under way.

    Attributes:
        found: whether backwards were nested so far.
    """

    def __init__(self, module: nn.Module, backward: Backward, steps: StepConductor) -> None:
        self._backward = backward
        self._steps = steps
        self._newest = -1
        self._num_backwards = 0
        self.found = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            for parameter in module.parameters()
            if parameter.requires_grad
        ]

    def release(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _ready(self, parameter: torch.Tensor) -> None:
        outer = self._backward.task
        if outer is None:
            return
        if outer != backward_number():
            self.found = True
        if self.found:
            if (recorder := self._steps.open_recorder) is not None:
                recorder.grad_ready()
        elif outer != self._newest:
            self._newest = outer
            self._num_backwards += 1
            if self._num_backwards == _TRIAL:
                at_end_of_backward(self.release)  # not under the engine's feet
