"""The exact weight and the clock from one place: an identity at the model's output.

Its backward multiplies the gradient by ``n * W / N`` (n samples in this forward, W ranks, N samples
in the step), so that the plain mean over ranks, which DDP takes, becomes the mean over the global
batch. The same backward asks the autograd engine to call back when this rank's own backward is
done, which is before DDP waits for the others.

Right for losses that are means over the samples of a forward, whatever is done to the output
afterwards, regularisers included. An output may be fed back into the model, or into another one:
the gradient that leaves a model through such an input is divided by the weight, so that outside of
models every gradient is the true one, and inside it is the weighted one. Wrong, and refused or left
to ``Balancer.weight``, where the output does not reach the loss by first-order differentiation
alone: gradient penalties, side losses kept on a module.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._private_torch import at_end_of_backward
from ...exceptions import invalid
from .._containers import rebuild
from .._finite import look_at
from ._protocols import ModelSession, Use, Weight


class Backward:
    """Tells once for every backward that it is done, however many outputs it started from.

    The engine calls back in the order of asking. The output's node runs first in a backward and
    asks first, DDP asks when its last bucket is ready: so ``backward_done`` comes before DDP waits
    for the others, and what is asked for inside of it comes after that wait.

    Args:
        session: has the steps, which are told.
        first_order: whether a backward that builds a graph is refused. It is at a model's output,
            where the weight would enter a non-linear term; at the loss it is linear.
    """

    def __init__(self, session: ModelSession, *, first_order: bool) -> None:
        self._session = session
        self._first_order = first_order
        self._task = -1  # the engine's number of the backward that has asked already
        self._uses: list[Any] = []

    @property
    def task(self) -> int | None:
        """The engine's number of the backward under way; None outside of one."""
        return None if self._task < 0 else self._task

    def entered(self, use: Use) -> None:
        """Ask the engine, from inside a backward through a forward, to call back at its end."""
        if self._first_order and torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        task = torch._C._current_graph_task_id()
        if task != self._task:  # a backward that raised never came to its callbacks
            self._task, self._uses = task, [use]
            self._session.steps.backward_begins()
            at_end_of_backward(self._finished)
        elif not any(known is use for known in self._uses):
            self._uses.append(use)

    def _finished(self) -> None:
        self._task = -1
        uses, self._uses = self._uses, []
        steps = self._session.steps
        steps.backward_done(uses)
        at_end_of_backward(steps.reduced)


class _OutputScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, use: Use, backward: Backward) -> Any:
        ctx.use = use
        ctx.backward_of = backward
        # The gradient at a loss is 1 whatever the loss.
        ctx.loss = None if output.ndim else output.detach()
        # A view: no copy of large logits. A loss is copied, as scripts scale it in place.
        return output.view_as(output) if output.ndim else output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.backward_of.entered(ctx.use)
        # A Python number: no kernel, no copy to the device, and never rounded to half precision,
        # where 11/14 + 3/14 is not 1: torch multiplies those in single.
        weight = known(ctx.use.weight)
        if weight == 0.0:  # a mean over nothing has a gradient of NaN, and 0 * NaN is NaN
            return torch.zeros_like(grads[0]), None, None
        look_at(grads[0], ctx.use.looks)
        if ctx.loss is not None:
            look_at(ctx.loss, ctx.use.looks)
        return grads[0] * weight, None, None


class _InputUnscale(torch.autograd.Function):
    """The identity at an input that was computed from a scaled output.

    The gradient that leaves a model through it is the true one again, so that the output before
    weighs it once, beside what reaches that output by other ways.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, use: Use) -> Any:
        ctx.use = use
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        weight = known(ctx.use.weight)
        return (grads[0] / weight if weight else torch.zeros_like(grads[0])), None


def known(weight: Weight) -> float:
    """Return a weight that may have to be asked for."""
    return weight if isinstance(weight, float) else weight()


_TWICE = (
    "A gradient of a gradient passes through the balanced model's output (`create_graph=True`, "
    "as in gradient penalties): the weight at the output would enter it non-linearly and give a "
    "wrong gradient. Prepare the model with `prepare(..., weighting='loss')` and multiply each "
    "loss by hand: `balancer.weight(loss).backward()`."
)


def scale(value: Any, use: Use, backward: Backward) -> tuple[Any, int]:
    """Return ``value`` with every tensor in it that needs a gradient scaled, and their number.

    Containers keep their type: dicts and their kin (Hugging Face's ``ModelOutput``), lists,
    tuples, named tuples and dataclasses. What is neither a tensor nor a container is kept.
    """
    count = 0

    def visit(item: Any) -> Any:
        nonlocal count
        if isinstance(item, torch.Tensor):
            if not item.requires_grad:
                return item
            count += 1
            return _OutputScale.apply(item, use, backward)  # type: ignore[no-untyped-call]
        return rebuild(item, visit, _without_hidden_tensors)

    return visit(value), count


def unscale(inputs: Any, use: Use) -> Any:
    """Return ``inputs`` with every tensor in them that needs a gradient unscaled."""

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if not item.requires_grad:
                return item
            return _InputUnscale.apply(item, use)  # type: ignore[no-untyped-call]
        return rebuild(item, visit, _without_hidden_tensors)

    return visit(inputs)


def _without_hidden_tensors(item: Any) -> Any:
    """Return ``item``, or raise if tensors sit where they cannot be weighted.

    As in `torch.distributions`.
    """
    hidden = getattr(item, "__dict__", {}).values()
    if any(isinstance(entry, torch.Tensor) and entry.requires_grad for entry in hidden):
        raise invalid(
            "The output of a balanced model, and what is computed from it,",
            "hold its tensors in tuples, lists, dicts or dataclasses",
            f"a {type(item).__name__} with tensors that need a gradient",
            "Return the tensors themselves, or prepare with `prepare(..., weighting='loss')` and "
            "use `balancer.weight(loss)`.",
        )
    return item


class InertHook:
    """What is left of a hook in a copy or a pickle of the model: it passes everything on."""

    def before(self, module: torch.nn.Module, inputs: Any, keywords: Any = None) -> None:
        """Do nothing."""

    def __call__(
        self, module: torch.nn.Module, inputs: Any, keywords: Any = None, output: Any = None
    ) -> Any:
        """Return ``output`` as it is."""
        return output
