"""What is looked at in a run for mistakes: its models, its optimizers, and how it ends."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from .._nested_tensors import tensors_in
from .._private_torch import (
    adds_to,
    at_end_of_backward,
    backward_number,
    hooks_of,
    version_kept,
    version_of,
)
from .._warning import OneWarning, warn
from ..exceptions import invalid
from ._data._step import StepCount
from ._model._compiled import UncompiledHook
from ._model._models import BalancedModel, NestedBackwards, PreparedModels
from ._model._weighting import Backward, nodes_behind
from ._step._marks import Looks
from ._step._tracker import StepTracker

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
    those are marked after the forward, so that only what a script makes of them comes through. Or
    into a parameter that no forward has read, as a temperature that the loss reads by itself.

    Every part has a hook during a look. There are no looks from the forward on of which an input
    was computed: a part may have computed it, and then its gradient is weighted at the output. Nor
    once what `prepare` returned is compiled, as graphs would be made again when the hooks go.

    Args:
        model: in DDP, weighted at its output.
        steps: have samples while one is under way.
    """

    def __init__(self, model: BalancedModel, steps: StepTracker) -> None:
        assert model.ddp is not None, "FSDP2 and plain models have other ways"
        self._model, self._ddp, self._steps = model, model.ddp, steps
        self._is_over = False
        self._warn = OneWarning()
        self._handles: list[RemovableHandle] = []
        self._num_forwards = 0
        self._given: list[tuple[str, torch.Tensor]] = []  # to hooks in this forward
        self._read: set[int] = set()  # ids of what the forwards of this look have read

    def begin(self) -> None:
        """Put the hooks on; in the middle of a forward as well."""
        if self._is_over or self._warn.said or self._model.compiles:
            return
        called, leave = self._inert(self._called), self._inert(self._leave)
        self._handles = [part.register_forward_hook(called) for part in _parts(self._ddp.module)]
        self._handles.append(self._ddp.register_forward_hook(leave, with_kwargs=True))
        self._handles += [
            one.register_post_accumulate_grad_hook(self._came)  # type: ignore[no-untyped-call]
            for one in self._ddp.parameters()
            if one.requires_grad
        ]
        # Ahead of the parts: where the model is compiled, all hooks go before those are traced.
        first = self._inert(lambda module, inputs: None)
        self._handles.append(self._ddp.register_forward_pre_hook(first))

    def end(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._given.clear()
        self._read.clear()

    def _inert(self, hook: Callable[..., None]) -> UncompiledHook:
        """Return a hook of which a copy or a pickle of the model has nothing."""
        made = UncompiledHook((hook,), hook)
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
        read = nodes_behind(tensors_in(output))
        self._read |= {id(node.variable) for node in read if hasattr(node, "variable")}
        for part in self._ddp.module.modules():
            name = type(part).__name__
            for attribute, value in vars(part).items():
                if attribute not in _OF_MODULES:
                    left = tensors_in(value) if isinstance(value, _HOLDERS) else ()
                    found += [(f"`{name}.{attribute}`", one) for one in left]
        for what, tensor in {id(one): (what, one) for what, one in found}.values():
            if tensor.grad_fn is not None and not tensor.retains_grad:
                self._mark(f"{what} was made in the model's forward", tensor)

    def _came(self, parameter: torch.Tensor) -> None:
        """Look at a gradient, perhaps of a parameter that no forward of this look has read."""
        assert parameter.grad is not None, "as this is called once it is there"
        if self._read and id(parameter) not in self._read and parameter.grad.any():
            what = f"A parameter of shape {tuple(parameter.shape)} was read outside of the model"
            at_end_of_backward(partial(self._passed, what, backward_number()))

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
            if set(map(type, hooks_of(part))) - {UncompiledHook}:
                what = f"What a forward hook on `{name}` was given"
                self._given += [(what, one) for one in tensors_in((inputs, output))]
            return
        what = f"`{name}` was called outside of the model, or by `forward` in place of `model(x)`"
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda gradient: self._passed(what))  # type: ignore[no-untyped-call]

    def _passed(self, what: str, task: int | None = None) -> None:
        """Warn; of a backward, if it came to an output: that of activations made again did not."""
        if self._is_over or self._warn.said or task not in (None, Backward.newest_task):
            return
        if task is None and not adds_to(self._ddp.parameters()):
            return  # as the gradient of an input, in an attack
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


def watch_states(module: nn.Module) -> list[RemovableHandle]:
    """Have recurrent layers of ``module`` refuse a state with more or fewer rows than their input.

    A script that carries the state from batch to batch, as language models over columns of a text
    do, trains until a plan changes the sizes. torch then names shapes, and no remedy. Where the
    columns of a rank change, the size of at least one other rank changes as well, so the run ends
    before a state meets another column unnoticed.

    Args:
        module: one that is not compiled, as a hook may cost a compilation.
    """
    kinds = (nn.RNNBase, nn.RNNCellBase)
    layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
    return [layer.register_forward_pre_hook(_check, with_kwargs=True) for layer in layers]


def _check(layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    values = dict(zip(("input", "hx"), inputs, strict=False)) | keywords
    state = values.get("hx")
    while isinstance(state, tuple | list) and state:  # of an LSTM: hidden and cell
        state = state[0]
    wanted = _rows_of(layer, values.get("input"))
    is_cell = isinstance(layer, nn.RNNCellBase)
    if wanted is None or not isinstance(state, torch.Tensor) or state.ndim != 3 - is_cell:
        return
    rows = state.shape[0 if is_cell else 1]
    if rows != wanted:
        raise invalid(
            f"{type(layer).__name__}.forward(hx=...)",
            f"have as many rows as its input, {wanted}",
            rows,
            "A state that is carried from batch to batch belongs to the rows of the last batch, "
            "and this plan gives the rank others. Keep the sizes, by `policy=Fixed((...))` and "
            "`DataLoader(drop_last=True)`, or begin every batch with a new state.",
        )


def _rows_of(layer: nn.Module, value: Any) -> int | None:
    """Return the rows of a batch; None where it has none, or is no tensor."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    is_cell = isinstance(layer, nn.RNNCellBase)
    if not isinstance(value, torch.Tensor) or value.ndim != 3 - is_cell:
        return None
    return int(value.shape[0 if is_cell or getattr(layer, "batch_first", False) else 1])


class Checks(Looks):
    """Looks for mistakes that would change the result, and that nothing else says.

    One is a parameter that an optimizer trains and no prepared model has, as of a critic or a head
    in a DDP of its own. A gradient that comes before the backward has come to a balanced output has
    no weight; what lies before a balanced model is weighted with it. A gradient that a script fills
    in, as for copies in single precision, comes by no backward.

    Args:
        models: all that were prepared.
        steps: have samples while one is under way.
        backward: knows whether the backward under way has come to a balanced output.
        count: steps of the run so far.
    """

    def __init__(
        self, models: PreparedModels, steps: StepTracker, backward: Backward, count: StepCount
    ) -> None:
        super().__init__()
        self._steps = steps
        self._unused = Unused(count)
        weakref.finalize(self, self._unused.close)  # at the end of a script that closes nothing
        self._states: list[RemovableHandle] = []
        self._looking: list[SubmoduleCalls | NestedBackwards] = []
        self._models, self._backward = models, backward
        self._warn = OneWarning()  # of what is not prepared
        self._next_gradients: dict[int, RemovableHandle] = {}  # by the id of the parameter
        self._has_unequal = False

    def add(self, model: BalancedModel, *, is_unequal: bool) -> None:
        """Look at a model too, and at what is trained beside it.

        Args:
            model: which was prepared.
            is_unequal: whether its weights may differ from 1.
        """
        if not model.compiles:  # a hook may cost a compilation
            self._unused.watch(model.module)
            self._states += watch_states(model.module)
            if model.weighs and model.ddp is not None and model.shards is None:
                self._looking.append(SubmoduleCalls(model, self._steps))
        if model.nested is not None:
            self._looking.append(model.nested)
        self._has_unequal |= is_unequal
        if self.due == math.inf and (self._looking or is_unequal):
            self.due = 0

    def turn(self, num_steps: int) -> None:
        """Begin a look, or end the one under way."""
        super().turn(num_steps)
        for one in self._looking:
            if self.is_open:
                one.begin()
            else:
                one.end()

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at what an optimizer is about to change."""
        if self._steps.num_samples is None or backward_number() >= 0:
            return  # not in a step of the run, or in a backward
        super().before_optimizer(optimizer)
        if not self._has_unequal or self._warn.said:
            return
        own = set(map(id, self._models.parameters()))
        for group in optimizer.param_groups:
            for one in group["params"]:
                is_trained = one.requires_grad and one.grad is not None
                if is_trained and id(one) not in own and id(one) not in self._next_gradients:
                    hook = one.register_post_accumulate_grad_hook(self._came)
                    self._next_gradients[id(one)] = hook

    def close(self) -> None:
        """Take all hooks off, and say if the models were trained past the balancer."""
        self._unused.close()
        for one in self._looking:
            one.end()
        for hook in (*self._states, *self._next_gradients.values()):
            hook.remove()
        self._looking.clear()
        self._states.clear()
        self._next_gradients.clear()
        self.due = math.inf

    def _came(self, parameter: torch.Tensor) -> None:
        """Look at a gradient of a parameter that no prepared model has."""
        hook = self._next_gradients.pop(id(parameter))
        at_end_of_backward(hook.remove)  # not under the engine's feet
        is_weighted = self._backward.task is not None or Backward.newest_task == backward_number()
        if is_weighted or self._steps.num_samples is None:
            return
        self._warn(
            f"An optimizer trains parameters of shape {tuple(parameter.shape)} that belong to no "
            f"prepared model, in a loop over a prepared loader. Their gradient is not weighted, so "
            f"it depends on how batches are split. Prepare that model too, "
            f"`balancer.prepare(model, other, loader)`, which averages its gradient over ranks as "
            f"well. If it is in a DDP of its own, `prepare(..., weighting='loss')` and "
            f"`balancer.weight(loss)` do too."
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
        self._handles: list[RemovableHandle] = []
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
            warn(
                "A prepared model was trained outside of a loop over the prepared loader, so "
                "nothing was balanced. Use what `prepare` returns, `model, loader = "
                "balancer.prepare(model, loader)`, and loop over that loader."
            )

    def _note(self, parameter: torch.Tensor) -> None:
        self._seen.append((weakref.ref(parameter), version_of(parameter)))
        at_end_of_backward(self._release)  # not under the engine's feet

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
