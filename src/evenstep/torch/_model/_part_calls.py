"""Gradients that come into a model beside its output, which is where they are weighted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from ..._private_torch import at_end_of_backward, backward_number, hooks_of, version_kept
from ..._warning import warn
from .._step._conductor import StepConductor
from .._step._containers import tensors_in
from ._compiled import Untraced

_HOLDERS = (torch.Tensor, list, tuple, dict)
_OF_MODULES = frozenset(vars(nn.Module()))  # parameters, buffers, hooks
_TRIAL = 3  # steps of a look
_SECOND_LOOK = 8  # the step of it; each look after that comes at twice the steps


class _Mark(torch.autograd.Function):
    """The identity, in place: what has read the tensor before does not go through it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, told: Callable[[], None]) -> Any:
        ctx.told = told
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.told()
        return grads[0], None


class PartCalls:
    """Warns once if a gradient comes into a model beside its output, where it has no weight.

    Through a part that was called outside of the model, as in ``model.module.head(model(x))``. Or
    through a tensor of a forward that was left on a module or given to a hook of the script's own:
    those are marked after the forward, so that only what a script makes of them comes through.

    A hook on every part costs time, so they go after a few steps, and come back ever more rarely.
    They go for good if an input of the model was computed: a part may have computed it, and then
    its gradient is weighted at the output. And they go before what `prepare` returned is compiled,
    as graphs would be made again when they go later.

    Args:
        ddp: the model, weighted at its output.
        steps: have samples while one is under way.

    Attributes:
        next_look: the step at which it comes.
    """

    def __init__(self, ddp: DistributedDataParallel, steps: StepConductor) -> None:
        self._ddp, self._steps = ddp, steps
        self._is_inside = False
        self._is_over = False
        self._handles: list[RemovableHandle] = []
        self._until, self.next_look = 0, 0.0
        self._num_forwards = 0
        self._hooked: list[tuple[str, torch.Tensor]] = []  # what hooks were given in this forward
        self._place()

    def look_again(self) -> None:
        """Look at some more steps, from a forward of the model on that begins now."""
        if self._is_over:
            self.next_look = math.inf
        elif not self._handles:
            self._place()
            self._is_inside = True

    def release(self) -> None:
        """Take the hooks off, for good."""
        self._is_over = True
        self._take_off()

    def _place(self) -> None:
        self._until = self._steps.num_steps + _TRIAL
        self.next_look = max(_SECOND_LOOK, 2 * self._steps.num_steps)
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
        self._hooked.clear()

    def _inert(self, hook: Callable[..., None]) -> Untraced:
        """Return a hook of which a copy or a pickle of the model has nothing."""

        def run(hooks: Sequence[Callable[..., None]], *args: Any) -> None:
            hooks[0](*args)

        made = Untraced((hook,), run)
        made.call = torch.compiler.disable(lambda *args: self.release())  # type: ignore[no-untyped-call]
        return made

    def _enter(self, module: nn.Module, inputs: Any, keywords: Any) -> None:
        self._is_inside = True
        self._num_forwards += 1
        if any(one.grad_fn is not None for one in tensors_in((inputs, keywords))):
            self.release()
        elif self._steps.num_steps >= self._until:
            self._take_off()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._is_inside = False
        found, self._hooked = self._hooked, []
        if self._steps.num_samples is None or not torch.is_grad_enabled():
            return
        for part in self._ddp.module.modules():
            name = type(part).__name__
            for attribute, value in vars(part).items():
                if attribute not in _OF_MODULES:
                    left = tensors_in(value) if isinstance(value, _HOLDERS) else ()
                    found += [(f"`{name}.{attribute}`", one) for one in left]
        for what, tensor in {id(one): (what, one) for what, one in found}.values():
            if tensor.grad_fn is not None and not tensor.retains_grad:
                self._mark(f"{what} was made in the model's forward", tensor)

    def _mark(self, what: str, tensor: torch.Tensor) -> None:
        """Have it told if a gradient comes through ``tensor`` to what has read it from now on.

        But not from a later forward, which may read what an earlier one has left.
        """
        number = self._num_forwards

        def told() -> None:
            if number == self._num_forwards:
                self._passed(what)

        with suppress(RuntimeError), version_kept(tensor):  # a view may not be changed in place
            _Mark.apply(tensor, told)  # type: ignore[no-untyped-call]

    def _called(self, part: nn.Module, inputs: Any, output: Any) -> None:
        in_step = self._steps.num_samples is not None
        if not in_step or not part.training or backward_number() >= 0:
            return  # the last: activation checkpointing calls parts again in a backward
        name = type(part).__name__
        if self._is_inside:
            if not all(isinstance(hook, Untraced) for hook in hooks_of(part)):
                what = f"What a forward hook on `{name}` was given"
                self._hooked += [(what, one) for one in tensors_in((inputs, output))]
            return
        what = f"`{name}` was called outside of the model, or by `forward` in place of `model(x)`"
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: self._passed(what))  # type: ignore[no-untyped-call]

    def _passed(self, what: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        at_end_of_backward(self._take_off)  # not under the engine's feet
        warn(
            f"{what}, and a gradient has come through it beside the model's output. That is not "
            f"weighted, so it depends on how batches are split. Have the model's forward return "
            f"what the loss is made of, or use `prepare(..., weighting='loss')` and "
            f"`balancer.weight(loss)`."
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
