"""Whether a prepared model was trained, and not on what a prepared loader hands out."""

from __future__ import annotations

import os
import sys
import weakref

import torch
import torch.distributed as dist

from ..._private_torch import at_end_of_backward, version_of
from ..._warning import warn
from .._data._step import StepCount

_MESSAGE = (
    "A prepared model was trained outside of a loop over the prepared loader, so nothing was "
    "balanced. Use what `prepare` returns, `model, loader = balancer.prepare(model, loader)`, "
    "and loop over that loader."
)


class Unused:
    """Says once, at the end, that training went past the balancer.

    Trained is a model whose parameters changed after a backward that reached them. One parameter
    of each model is looked at, and its hook goes with the first backward. Not for FSDP2, whose
    parameters no hook reaches.

    Args:
        count: steps of the run so far.
    """

    def __init__(self, count: StepCount) -> None:
        self._count = count
        self._process = os.getpid()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._seen: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def watch(self, module: torch.nn.Module) -> None:
        """Notice the first backward of ``module``, where there are other ranks to balance with."""
        if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_rank() > 0:
            return  # one rank of all says it
        parameter = next((p for p in module.parameters() if p.requires_grad), None)
        if parameter is not None:
            handle = parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def close(self) -> None:
        """Warn if it was so, unless an error has ended the script first."""
        self._release()
        seen, self._seen = self._seen, []
        failed = sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None
        if failed or self._count.begun or os.getpid() != self._process:
            return
        changed = ((parameter(), version) for parameter, version in seen)
        if any(parameter is not None and version_of(parameter) > old for parameter, old in changed):
            warn(_MESSAGE)

    def _note(self, parameter: torch.Tensor) -> None:
        self._seen.append((weakref.ref(parameter), version_of(parameter)))
        at_end_of_backward(self._release)  # not under the engine's feet

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
