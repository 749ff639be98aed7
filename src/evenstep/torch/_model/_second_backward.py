"""Backwards that DDP does not average, and those that it averages without an output in them."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from ..._warning import OneWarning
from .._step._uses import ForwardUse
from ._weighting import Backward, ForwardHook

_MESSAGE = (
    "A second backward has come after one forward of a model in DDP, which averages gradients over "
    "ranks in the first one alone: what the second adds differs from rank to rank, in plain DDP "
    "too. Add the losses up, and call `backward` once, or make a forward for each backward."
)


class SecondBackward:
    """Looks at one parameter of a model in every backward.

    Warns once of a backward after which ranks have gradients of their own. A backward that does
    not reach the parameter counts as none, as one for the gradient of an input alone.

    A backward of zeros past the output, as of ``sum(p.sum() for p in model.parameters()) * 0`` in
    place of a loss, is noted for the batch of the forward: DDP has averaged in it.

    Args:
        ddp: the model. Its newest forward sets whether a backward is to be reduced.
        backward: knows the backward under way.
        hook: knows the forwards whose backward DDP waits for.
    """

    def __init__(self, ddp: DistributedDataParallel, backward: Backward, hook: ForwardHook) -> None:
        warn, awaited = OneWarning(), hook.awaited
        spent: ForwardUse | None = None
        newest: int | None = None

        def ready(gradient: torch.Tensor) -> None:
            nonlocal spent, newest
            task = backward.task
            if task is None:
                uses = [use for use in awaited if use.reduces]
                if uses and not gradient.any():  # else of what all ranks share, as a decay
                    for use in uses:
                        backward.entered(use)
            elif task != newest and ddp.require_forward_param_sync and awaited:
                if awaited[-1] is spent:
                    warn(_MESSAGE)
                spent, newest = awaited[-1], task

        looked_at = next((p for p in ddp.parameters() if p.requires_grad), None)
        self._handle = None
        if looked_at is not None:
            self._handle = looked_at.register_hook(unserializable_hook(ready))  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
