"""The exact weight and the clock from one place: an identity at the model's output.

Its backward multiplies the gradient by ``n * W / N`` (n samples in this forward, W ranks, N samples
in the step), so that the plain mean over ranks, which DDP takes, becomes the mean over the global
batch. The same backward asks the autograd engine to call back when this rank's own backward is
done, which is before DDP waits for the others.

Right for losses that are means over the samples of a forward, whatever is done to the output
afterwards, regularisers included. Wrong, and refused or left to ``Balancer.weight``, where the
output does not reach the loss by first-order differentiation alone: gradient penalties, an
output fed back into the model, side losses kept on a module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...exceptions import invalid
from .._containers import rebuild

Weight = float | Callable[[], float]
"""What a gradient is multiplied by: known in the forward, or asked for in the backward."""


class Backward:
    """Tells once for every backward that it is done, however many outputs it started from.

    The engine calls back in the order of asking. The output's node runs first in a backward and
    asks first, DDP asks when its last bucket is ready: so ``done`` comes before DDP waits for the
    others, and what is asked for inside ``done`` comes after that wait.

    Args:
        done: called when the engine has finished this rank's own part.
        reduced: called when what others added to the backward is over too, such as DDP's wait.
        first_order: whether a backward that builds a graph is refused. It is at a model's output,
            where the weight would enter a non-linear term; at the loss it is linear.
    """

    def __init__(
        self, done: Callable[[], None], reduced: Callable[[], None], *, first_order: bool
    ) -> None:
        self._done = done
        self._reduced = reduced
        self._first_order = first_order
        self._task = -1  # the engine's number of the backward that has asked already

    @property
    def task(self) -> int | None:
        """The engine's number of the backward under way; None outside of one."""
        return None if self._task < 0 else self._task

    def entered(self) -> None:
        """Ask the engine, from inside a backward, to call back at its end."""
        if self._first_order and torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        task = torch._C._current_graph_task_id()
        if task != self._task:  # a backward that raised never came to its callbacks
            self._task = task
            at_end_of_backward(self._finished)

    def _finished(self) -> None:
        self._task = -1
        self._done()
        at_end_of_backward(self._reduced)


class _OutputScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, weight: Weight, backward: Backward) -> Any:
        # A Python number: no kernel, no copy to the device, and never rounded to half precision,
        # where 11/14 + 3/14 is not 1: torch multiplies those in single.
        ctx.weight = weight
        ctx.backward_of = backward
        # A view: no copy of large logits. A loss is copied, as scripts scale it in place.
        return output.view_as(output) if output.ndim else output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.backward_of.entered()
        weight = ctx.weight if isinstance(ctx.weight, float) else ctx.weight()
        if weight == 0.0:  # a mean over nothing has a gradient of NaN, and 0 * NaN is NaN
            return torch.zeros_like(grads[0]), None, None
        return grads[0] * weight, None, None


_TWICE = (
    "A gradient of a gradient passes through the balanced model's output (`create_graph=True`, "
    "as in gradient penalties): the weight at the output would enter it non-linearly and give a "
    "wrong gradient. Prepare the model with `prepare(..., weighting='loss')` and multiply each "
    "loss by hand: `balancer.weight(loss).backward()`."
)


def scale(value: Any, weight: Weight, backward: Backward) -> tuple[Any, int]:
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
            return _OutputScale.apply(item, weight, backward)  # type: ignore[no-untyped-call]
        return rebuild(item, visit, _without_hidden_tensors)

    return visit(value), count


def _without_hidden_tensors(item: Any) -> Any:
    """Return ``item``, or raise if tensors sit where nobody can weight them.

    As in `torch.distributions`.
    """
    hidden = getattr(item, "__dict__", {}).values()
    if any(isinstance(entry, torch.Tensor) and entry.requires_grad for entry in hidden):
        raise invalid(
            "The output of a balanced model",
            "hold its tensors in tuples, lists, dicts or dataclasses",
            f"a {type(item).__name__} with tensors that need a gradient",
            "Return the tensors themselves, or prepare with `prepare(..., weighting='loss')` and "
            "use `balancer.weight(loss)`.",
        )
    return item


def feeds_back(inputs: Any) -> bool:
    """Tell whether a tensor among ``inputs`` was computed from a scaled output.

    Walks the autograd graph, which inputs rarely have: data needs no gradient.
    """
    queue: list[Any] = [tensor.grad_fn for tensor in _tensors(inputs) if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        if node.name() == "_OutputScaleBackward":
            return True
        seen.add(node)
        queue.extend(parent for parent, _ in node.next_functions)
    return False


def _tensors(item: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers; at every forward, so without recursion."""
    found, queue = [], [item]
    while queue:
        item = queue.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            queue.extend(item)
        elif isinstance(item, (dict, Mapping)):
            queue.extend(item.values())
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            queue.extend(getattr(item, field.name) for field in dataclasses.fields(item))
    return found


class OutputHook:
    """Forward hook for the user's outermost module: scales what it returns.

    Args:
        current: gives the weight of this forward, or None outside a balanced step.
        backward: told at every backward through the output.
    """

    def __init__(self, current: Callable[[], Weight | None], backward: Backward) -> None:
        self._current = current
        self._backward = backward

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()  # `copy.deepcopy(model)` and `torch.save(model)` leave the run behind

    def before(self, module: torch.nn.Module, inputs: Any, keywords: Any) -> None:
        """Refuse an output that is fed back: it would be scaled twice."""
        if torch.is_grad_enabled() and feeds_back((inputs, keywords)):
            raise invalid(
                f"{type(module).__name__}.forward(...)",
                "get inputs that were not computed from the output of a balanced model",
                "an output fed back into the model, or into another, which would be weighted twice",
                "Prepare with `prepare(..., weighting='loss')` and use `balancer.weight(loss)`.",
            )

    def __call__(self, module: torch.nn.Module, inputs: Any, keywords: Any, output: Any) -> Any:
        """Return ``output``, scaled where a step is under way."""
        weight = self._current()
        if weight is None or not torch.is_grad_enabled():
            return output
        scaled, count = scale(output, weight, self._backward)
        if not count and module.training:
            raise invalid(
                f"{type(module).__name__}.forward(...)",
                "return a tensor that needs a gradient, by itself or in a container",
                f"{type(output).__name__} without one",
                "Unfreeze a parameter, leave `torch.no_grad()`, or prepare with "
                "`prepare(..., weighting='loss')` and use `balancer.weight(loss)`.",
            )
        return scaled


class InertHook:
    """What is left of a hook in a copy or a pickle of the model: it passes everything on."""

    def before(self, module: torch.nn.Module, inputs: Any, keywords: Any = None) -> None:
        """Do nothing."""

    def __call__(
        self, module: torch.nn.Module, inputs: Any, keywords: Any = None, output: Any = None
    ) -> Any:
        """Return ``output`` as it is."""
        return output


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have the autograd engine call ``callback`` when the backward under way is done.

    From inside a callback as well: the engine goes on to those added meanwhile. The attribute path
    is private to torch and the same since 1.0; a test holds it for the pinned version.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
