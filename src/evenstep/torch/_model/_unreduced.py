"""Backwards that DDP does not average, and those that it averages without an output in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from ..._warning import warn
from .._step._uses import ForwardUse
from ._weighting import Backward

_MESSAGE = (
    "A second backward has come after one forward of a model in DDP, which averages gradients over "
    "ranks in the first one alone: what the second adds differs from rank to rank, in plain DDP "
    "too. Add the losses up, and call `backward` once, or make a forward for each backward."
)


_TRIAL = 4  # backwards after which a script is believed to make one for each forward


class Unreduced:
    """Looks at one parameter of a model in every backward.

    Warns once of a backward after which ranks have gradients of their own, in the first few. A
    backward that does not reach the parameter counts as none, as one for the gradient of an input
    alone.

    A backward of zeros past the output, as of ``sum(p.sum() for p in model.parameters()) * 0`` in
    place of a loss, is noted for the batch of the forward: DDP has averaged in it.

    Args:
        ddp: the model.
        backward: knows the backward under way.
        awaited: returns the forwards whose backward DDP waits for.

    Attributes:
        is_over: whether the trial is over.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        backward: Backward,
        awaited: Callable[[], Sequence[ForwardUse]],
    ) -> None:
        self._backward = backward
        self._awaited = awaited
        self._syncs = self._is_spent = False
        self._task: int | None = None
        self._num_left = _TRIAL
        self.is_over = False
        self._handle = None
        looked_at = next((p for p in ddp.parameters() if p.requires_grad), None)
        if looked_at is not None:
            hook = unserializable_hook(lambda gradient: self._ready(gradient))  # type: ignore[no-untyped-call]
            self._handle = looked_at.register_hook(hook)  # type: ignore[no-untyped-call]

    def forward(self, *, syncs: bool) -> None:
        """Hear of a forward with gradients, and whether its backward is to be reduced."""
        self._syncs, self._is_spent = syncs, False

    def release(self) -> None:
        """Take the hook off."""
        self.is_over = True
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _ready(self, gradient: torch.Tensor) -> None:
        task = self._backward.task
        if task is None:
            uses = self._awaited()
            if uses and not gradient.any():
                for use in uses:
                    self._backward.entered(use)
            return  # else of what all ranks share, as a decay
        if self.is_over or not self._syncs or (self._is_spent and task == self._task):
            return  # to be reduced later, or in parts
        if self._is_spent:
            warn(_MESSAGE)
            self._syncs = False
        self._num_left -= 1
        self.is_over = self._is_spent or not self._num_left
        self._is_spent, self._task = True, task
