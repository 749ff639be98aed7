"""Gradients that come into a model beside its output, which is where they are weighted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from ..._nested_tensors import tensors_in
from ..._private_torch import at_end_of_backward, backward_number, hooks_of, version_kept
from ..._warning import OneWarning
from .._model._compiled import Untraced
from .._model._models import BalancedModel
from .._step._conductor import StepConductor

_HOLDERS = (torch.Tensor, list, tuple, dict)
_GRAD_FN = attrgetter("grad_fn")
_OF_MODULES = frozenset(vars(nn.Module()))  # parameters, buffers, hooks


class _Mark(torch.autograd.Function):
    """The identity, in place: what has read the tensor before does not go through it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, passed: Callable[[], None]) -> Any:
        ctx.passed = passed
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.passed()
        return grads[0], None


class SubmoduleCalls:
    """Warns once if a gradient comes into a model beside its output, where it has no weight.

    Through a part that was called outside of the model, as in ``model.module.head(model(x))``. Or
    through a tensor of a forward that was left on a module or given to a hook of the script's own:
    those are marked after the forward, so that only what a script makes of them comes through.

    Every part has a hook during a look. There are no looks from the forward on of which an input
    was computed: a part may have computed it, and then its gradient is weighted at the output. Nor
    once what `prepare` returned is compiled, as graphs would be made again when the hooks go.

    Args:
        model: in DDP, weighted at its output.
        steps: have samples while one is under way.
    """

    def __init__(self, model: BalancedModel, steps: StepConductor) -> None:
        assert model.ddp is not None, "FSDP2 and plain models have other ways"
        self._model, self._ddp, self._steps = model, model.ddp, steps
        self._is_over = False
        self._warn = OneWarning()
        self._handles: list[RemovableHandle] = []
        self._num_forwards = 0
        self._given: list[tuple[str, torch.Tensor]] = []  # to hooks in this forward

    def begin(self) -> None:
        """Put the hooks on; in the middle of a forward as well."""
        if self._is_over or self._warn.said or self._model.compiles:
            return
        called, leave = self._inert(self._called), self._inert(self._leave)
        self._handles = [part.register_forward_hook(called) for part in _parts(self._ddp.module)]
        self._handles.append(self._ddp.register_forward_hook(leave, with_kwargs=True))
        # Ahead of the parts: where the model is compiled, all hooks go before those are traced.
        first = self._inert(lambda module, inputs: None)
        self._handles.append(self._ddp.register_forward_pre_hook(first))

    def end(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._given.clear()

    def _inert(self, hook: Callable[..., None]) -> Untraced:
        """Return a hook of which a copy or a pickle of the model has nothing."""
        made = Untraced((hook,), hook)
        made.call = torch.compiler.disable(lambda *args: self._release())  # type: ignore[no-untyped-call]
        return made

    def _release(self) -> None:
        self._is_over = True
        self.end()

    def _leave(self, module: nn.Module, inputs: Any, keywords: Any, output: Any) -> None:
        self._num_forwards += 1
        if set(map(_GRAD_FN, tensors_in((inputs, keywords)))) - {None}:
            self._release()
        found, self._given = self._given, []
        if self._is_over or self._steps.num_samples is None or not torch.is_grad_enabled():
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
        """Note whether a gradient comes through ``tensor`` from what reads it from now on.

        But not from a later forward, which may read what an earlier one has left.
        """
        number = self._num_forwards

        def passed() -> None:
            if number == self._num_forwards:
                self._passed(what)

        with suppress(RuntimeError), version_kept(tensor):  # a view may not be changed in place
            _Mark.apply(tensor, passed)  # type: ignore[no-untyped-call]

    def _called(self, part: nn.Module, inputs: Any, output: Any) -> None:
        in_step = self._steps.num_samples is not None
        if not in_step or not part.training or backward_number() >= 0:
            return  # the last: activation checkpointing calls parts again in a backward
        name = type(part).__name__
        if self._model.hook.use is not None:  # inside of a forward
            if set(map(type, hooks_of(part))) - {Untraced}:
                what = f"What a forward hook on `{name}` was given"
                self._given += [(what, one) for one in tensors_in((inputs, output))]
            return
        what = f"`{name}` was called outside of the model, or by `forward` in place of `model(x)`"
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: self._passed(what))  # type: ignore[no-untyped-call]

    def _passed(self, what: str) -> None:
        if self._is_over or self._warn.said:
            return
        at_end_of_backward(self.end)  # not under the engine's feet
        self._warn(
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
