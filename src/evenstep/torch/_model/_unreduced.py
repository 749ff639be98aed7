"""Backwards whose gradients DDP does not average: only the first one after a forward is reduced."""

from __future__ import annotations

import warnings

import torch
from torch.nn.parallel import DistributedDataParallel

from ..._private_torch import at_end_of_backward
from ...exceptions import EvenstepWarning
from ._weighting import Backward

_MESSAGE = (
    "A second backward has come after one forward of a model in DDP, which averages gradients over "
    "ranks in the first one alone: what the second adds differs from rank to rank, in plain DDP "
    "too. Add the losses up, and call `backward` once."
)


_TRIAL = 4  # backwards after which a script is believed to make one for each forward


class Unreduced:
    """Warns once of a backward after which ranks have gradients of their own.

    One parameter of the model is looked at, in the first few backwards. A backward that does not
    reach it counts as none, as one for the gradient of an input alone.

    Args:
        ddp: the model.
        backward: knows the backward under way.

    Attributes:
        is_over: whether nothing is looked at any more.
    """

    def __init__(self, ddp: DistributedDataParallel, backward: Backward) -> None:
        self._backward = backward
        self._syncs = self._is_spent = False
        self._task: int | None = None
        self._num_left = _TRIAL
        self.is_over = False
        looked_at = next((p for p in ddp.parameters() if p.requires_grad), None)
        self._handle = None
        if looked_at is not None:
            self._handle = looked_at.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def forward(self, *, syncs: bool) -> None:
        """Hear of a forward with gradients, and whether its backward is to be reduced."""
        self._syncs, self._is_spent = syncs, False

    def release(self) -> None:
        """Take the hook off."""
        self.is_over = True
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _ready(self, parameter: torch.Tensor) -> None:
        task = self._backward.task
        if task is None or not self._syncs or (self._is_spent and task == self._task):
            return  # of what all ranks share, as a decay; to be reduced later; or in parts
        if self._is_spent:
            warnings.warn(_MESSAGE, EvenstepWarning, stacklevel=2)
            self._syncs = False
        self._num_left -= 1
        if self._is_spent or not self._num_left:
            at_end_of_backward(self.release)  # not under the engine's feet
        self._is_spent, self._task = True, task
