"""Parts of a model that are called by themselves: what is weighted is the output of the whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from ..._private_torch import backward_number
from ...exceptions import EvenstepWarning
from .._step._conductor import StepConductor
from .._step._containers import tensors_in
from ._compiled import Untraced

_TRIAL = 3  # steps of a look
_SECOND_LOOK = 8  # the step of it; each look after that comes at twice the steps


class PartCalls:
    """Warns once if a gradient comes through a part that was called outside of the model.

    As in ``model.module.head(model(x))``: what the head's parameters get is not weighted. A hook on
    every part costs time, so they go after a few steps, and come back ever more rarely. They go for
    good if an input of the model was computed: a part may have computed it, and then its gradient
    is weighted at the output. And they go before what `prepare` returned is compiled, as graphs
    would be made again when they go later.

    Args:
        ddp: the model, weighted at its output.
        steps: have samples while one is under way.
    """

    def __init__(self, ddp: DistributedDataParallel, steps: StepConductor) -> None:
        self._ddp, self._steps = ddp, steps
        self._is_inside = False
        self._is_over = False
        self._handles: list[RemovableHandle] = []
        self._until = self._next = 0
        self._place()

    def forward(self) -> None:
        """Hear that a forward of the model begins, and look again if it is time."""
        if self._steps.num_steps >= self._next and not self._handles and not self._is_over:
            self._place()
            self._is_inside = True

    def release(self) -> None:
        """Take the hooks off, for good."""
        self._is_over = True
        self._take_off()

    def _place(self) -> None:
        self._until = self._steps.num_steps + _TRIAL
        self._next = max(_SECOND_LOOK, 2 * self._steps.num_steps)
        called = self._inert(self._called)
        self._handles = [part.register_forward_hook(called) for part in _parts(self._ddp.module)]
        self._handles += [
            self._ddp.register_forward_pre_hook(self._inert(self._enter), with_kwargs=True),
            self._ddp.register_forward_hook(self._inert(self._leave)),
        ]

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _inert(self, hook: Callable[..., None]) -> Untraced:
        """Return a hook of which a copy or a pickle of the model has nothing."""

        def run(hooks: Sequence[Callable[..., None]], *args: Any) -> None:
            hooks[0](*args)

        made = Untraced((hook,), run)
        made.call = torch.compiler.disable(lambda *args: self.release())  # type: ignore[no-untyped-call]
        return made

    def _enter(self, module: nn.Module, inputs: Any, keywords: Any) -> None:
        self._is_inside = True
        if any(one.grad_fn is not None for one in tensors_in((inputs, keywords))):
            self.release()
        elif self._steps.num_steps >= self._until:
            self._take_off()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._is_inside = False

    def _called(self, part: nn.Module, inputs: Any, output: Any) -> None:
        in_step = self._steps.num_samples is not None
        if self._is_inside or not in_step or not part.training or backward_number() >= 0:
            return  # the last: activation checkpointing calls parts again in a backward
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._passed, type(part).__name__))  # type: ignore[no-untyped-call]

    def _passed(self, name: str, gradient: torch.Tensor) -> None:
        if self._is_over:
            return
        self._is_over = True
        warnings.warn(
            f"`{name}` was called outside of the model that it is a part of, and a gradient has "
            f"come through it. That is not weighted, so it depends on how batches are split. Call "
            f"the part in the model's own forward, or use `prepare(..., weighting='loss')` and "
            f"`balancer.weight(loss)`.",
            EvenstepWarning,
            stacklevel=2,
        )


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module`` and its parts that have something to train.

    Not those that make a parameter out of others, which are called wherever it is read.
    """
    if isinstance(module, ParametrizationList):
        return
    if any(parameter.requires_grad for parameter in module.parameters()):
        yield module
    for child in module.children():
        yield from _parts(child)
