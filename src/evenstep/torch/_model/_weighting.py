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

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ..._nested_tensors import hidden_tensors_in, rebuild, tensors_in
from ..._private_torch import address_of, adds_to, at_end_of_backward, backward_number, base_of
from ...exceptions import invalid
from .._step._batch_checks import UnknownBatch
from .._step._batch_memory import has_memory
from .._step._reductions import ForwardRecord, look_at
from .._step._reporter import CompileWatch
from .._step._tickets import known, not_averaged
from .._step._tracker import StepTracker


class Backward:
    """Reports once for every backward that it is done, however many outputs it started from.

    The engine calls back in the order of asking. The output's node runs first in a backward and
    asks first, DDP asks when its last bucket is ready: so ``backward_done`` comes before DDP waits
    for the others, and what is asked for inside of it comes after that wait.

    Args:
        steps: are notified.

    Attributes:
        task: the engine's number of the backward under way; None outside of one.
        newest_task: the engine's number of the newest backward that came to a balanced output, of
            any balancer.
    """

    newest_task: ClassVar[int] = -1

    def __init__(self, steps: StepTracker) -> None:
        self._steps = steps
        self.task: int | None = None
        self._uses: list[ForwardRecord] = []

    def entered(self, use: ForwardRecord) -> None:
        """Ask the engine, from inside a backward through a forward, to call back at its end."""
        task = backward_number()
        if task != self.task:  # a backward that raised never came to its callbacks
            self.task, self._uses = task, [use]
            Backward.newest_task = task
            self._steps.backward_begins()
            at_end_of_backward(self._finished)
        elif not any(known is use for known in self._uses):
            self._uses.append(use)

    def _finished(self) -> None:
        self.task = None
        uses, self._uses = self._uses, []
        self._steps.backward_done(uses)
        at_end_of_backward(self._steps.reduced)


class _OutputScale(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        use: ForwardRecord,
        backward: Backward,
        first_order: bool,
        number: int,
    ) -> Any:
        ctx.use, ctx.backward_of, ctx.first_order = use, backward, first_order
        ctx.number = number if use.compares else None
        ctx.loss = None if output.ndim else output.detach()
        if not (first_order and output.ndim):
            return output.clone()  # a loss: the script may still read what it gave
        # No copy, and of the same version: what a layer saved for its backward is protected. Nor a
        # view to autograd, so that the script may change it in place.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.first_order and torch.is_grad_enabled():
            raise RuntimeError(_TWICE)
        ctx.backward_of.entered(ctx.use)
        # A Python number: no copy to the device, and never rounded to half precision, where
        # 11/14 + 3/14 is not 1: torch multiplies those in single.
        weight = ctx.use.weight
        if not isinstance(weight, float):
            weight = weight()
        if weight == 0.0:  # a mean over nothing has a gradient of NaN, and 0 * NaN is NaN
            return torch.zeros_like(grads[0]), None, None, None, None
        # Of a loss, as the script multiplies it: its own gradient is nothing but that factor.
        seen = grads[0] if ctx.loss is None else _single(ctx.loss) * _single(grads[0])
        number, trains = ctx.number, ctx.use.trains
        if number is not None and trains is not None and not trains():
            number = ~number  # of the gradient of an input
        look_at(seen, ctx.use.looks, output=number, is_half=grads[0].dtype == torch.float16)
        return grads[0] if weight == 1.0 else grads[0] * weight, None, None, None, None


def _single(value: torch.Tensor) -> torch.Tensor:
    """Return ``value``, in single precision at least: products of halves overflow."""
    return value.float() if value.itemsize == 2 else value


class EvenstepOutputThatSharesMemory_CloneItFirst(_OutputScale):  # torch's error has the name
    """As a view, which autograd refuses to change in place: others would change with it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *args: Any) -> Any:
        _OutputScale.forward(ctx, output, *args)
        return output.view_as(output)


class _InputUnscale(torch.autograd.Function):
    """The identity at an input that was computed from a scaled output.

    The gradient that leaves a model through it is the true one again, so that the output before
    weighs it once, beside what reaches that output by other ways.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, use: ForwardRecord) -> Any:
        ctx.use = use
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        weight = known(ctx.use.weight)
        return (grads[0] / weight if weight else torch.zeros_like(grads[0])), None


_NEEDS_GRADIENT = attrgetter("requires_grad")
_Shared = EvenstepOutputThatSharesMemory_CloneItFirst
# Autograd names a node by its function.
_SCALED = f"{_OutputScale.__name__}Backward", f"{_Shared.__name__}Backward"
_MOST_AWAITED = 64  # forwards of one step
_MOST_NODES = 32  # of a loss: its terms and what is done to them, not the model
_TWICE = (
    "A gradient of a gradient passes through the balanced model's output (`create_graph=True`, "
    "as in gradient penalties): the weight at the output would enter it non-linearly and give a "
    "wrong gradient. Prepare the model with `prepare(..., weighting='loss')` and multiply each "
    "loss by hand: `balancer.weight(loss).backward()`."
)


def scale(
    value: Any, use: ForwardRecord, backward: Backward, *, first_order: bool = True
) -> tuple[Any, int]:
    """Return ``value`` with every tensor in it that needs a gradient scaled, and their number.

    Containers keep their type: dicts and their kin (Hugging Face's ``ModelOutput``), lists,
    tuples, named tuples and dataclasses. What is neither a tensor nor a container is kept.

    Args:
        value: a model's output, or a loss.
        use: the forward that it comes from.
        backward: is notified of every backward through it.
        first_order: whether a backward that builds a graph is refused. It is at a model's output,
            where the weight would enter a non-linear term; at the loss it is linear.
    """
    if type(value) is torch.Tensor:  # as nearly always, and without a cycle to be collected
        if not value.requires_grad:
            return value, 0
        base = base_of(value)
        is_shared = value.is_leaf or (base is not None and base.is_leaf)
        function = _Shared if is_shared else _OutputScale
        return function.apply(value, use, backward, first_order, 0), 1  # type: ignore[no-untyped-call]
    shared = _in_memory_of_several(value)

    def scaled(tensor: torch.Tensor, number: int) -> Any:
        base = base_of(tensor)
        is_shared = tensor.is_leaf or (base is not None and base.is_leaf) or id(tensor) in shared
        function = _Shared if is_shared else _OutputScale
        return function.apply(tensor, use, backward, first_order, number)  # type: ignore[no-untyped-call]

    return _mapped(value, scaled)


def _in_memory_of_several(value: Any) -> set[int]:
    """Return the ids of the tensors in ``value`` that share memory with another one in it."""
    # Without losses, which are copied.
    tensors = {id(one): one for one in tensors_in(value) if one.requires_grad and one.ndim}
    owners: defaultdict[int, list[int]] = defaultdict(list)
    if len(tensors) > 1:
        for number, tensor in tensors.items():
            if has_memory(tensor):
                owners[address_of(tensor.untyped_storage())].append(number)
    return {number for numbers in owners.values() if len(numbers) > 1 for number in numbers}


def unscale(inputs: Any, use: ForwardRecord) -> Any:
    """Return ``inputs`` with every tensor in them that needs a gradient unscaled."""
    unscaled, _ = _mapped(inputs, lambda tensor, number: _InputUnscale.apply(tensor, use))  # type: ignore[no-untyped-call]
    return unscaled


def _mapped(value: Any, change: Callable[[torch.Tensor, int], Any]) -> tuple[Any, int]:
    """Return ``value`` with every tensor in it that needs a gradient changed, and their number.

    Args:
        value: a tensor, or a container.
        change: returns the new tensor; gets the old one, and its number among them.
    """
    if type(value) is torch.Tensor:  # as nearly always, and without a cycle to be collected
        return (change(value, 0), 1) if value.requires_grad else (value, 0)
    changed: dict[int, Any] = {}  # what is there twice stays one tensor

    def visit(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return rebuild(item, visit, _without_hidden_tensors)
        if not item.requires_grad:
            return item
        if id(item) not in changed:
            changed[id(item)] = change(item, len(changed))
        return changed[id(item)]

    return visit(value), len(changed)


def _without_hidden_tensors(item: Any) -> Any:
    """Return ``item``, or raise if tensors sit where they cannot be weighted.

    As in `torch.distributions`.
    """
    if any(tensor.requires_grad for tensor in hidden_tensors_in(item)):
        raise invalid(
            "The output of a balanced model, and what is computed from it,",
            "hold its tensors in tuples, lists, dicts or dataclasses",
            f"a {type(item).__name__} with tensors that need a gradient",
            "Return the tensors themselves, or prepare with `prepare(..., weighting='loss')` and "
            "use `balancer.weight(loss)`.",
        )
    return item


def check_unweighted(loss: torch.Tensor) -> None:
    """Raise if a term of ``loss`` is weighted, as far as its newest operations show.

    Raises:
        ValueError: one is: the sum would weigh it twice.
    """
    if any(node.name() in _SCALED for node in islice(nodes_behind([loss]), _MOST_NODES)):
        raise invalid(
            "Balancer.weight(loss)",
            "be given a loss of which no term is weighted",
            "one that holds what `weight` returned",
            "Weigh each term, or their sum, but not both.",
        )


def nodes_behind(tensors: Iterable[torch.Tensor], ends: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the nodes of which ``tensors`` were computed, the nearest first.

    Args:
        tensors: any.
        ends: names of nodes behind which nothing is looked for.
    """
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(nodes)
    for node in nodes:  # which grows meanwhile
        yield node
        if node.name() not in ends:
            new = {parent for parent, _ in node.next_functions if parent is not None} - seen
            seen |= new
            nodes += new


class ForwardHook:
    """Forward hooks for the user's outermost module.

    Args:
        steps: are notified of forwards.
        backward: is notified at every backward through the output.
        watch: marks inputs, where the model is compiled after it was prepared; None leaves that to
            another hook.
        model: the model's number, in the order of ``prepare``.
        weighs: whether the output is scaled; ``Balancer.weight`` does it otherwise.
        ddp: the model's: it knows whether the backward of a forward made now reduces gradients.
            None for other wrappers: how a model is sharded does not show that.

    Attributes:
        awaited: the newest forwards that are reduced; DDP waits for a backward of some.
        use: the forward under way; None outside of one, or of a step.
    """

    def __init__(
        self,
        steps: StepTracker,
        backward: Backward,
        watch: CompileWatch | None = None,
        *,
        model: int = 0,
        weighs: bool = True,
        ddp: DistributedDataParallel | None = None,
    ) -> None:
        self._steps = steps
        self._backward = backward
        self._watch = watch
        self._model = model
        self._weighs = weighs
        self._ddp = ddp
        self._strange = UnknownBatch()
        self.awaited: deque[ForwardRecord] = deque(maxlen=_MOST_AWAITED)  # the newest that reduce
        self.use: ForwardRecord | None = None

    def before(self, module: torch.nn.Module, inputs: Any, keywords: Any) -> Any:
        """Learn whose batch this is; take the weight out of gradients that go back to an output."""
        self.use = None
        if not torch.is_grad_enabled():
            return None
        tensors = tensors_in((inputs, keywords) if keywords else inputs)
        reduces = None if self._ddp is None else self._ddp.require_backward_grad_sync
        use = self.use = self._steps.begin_use(self._model, tensors, reduces=reduces)
        if use is None and module.training:
            self._steps.outside()
        if use is not None and use.reduces is False and not use.ticket.is_last and self._waits():
            use.weight = not_averaged
        changed = None
        if use is not None and self._weighs:
            if use.match.other_rows:
                self._strange.look(use, tensors)
            # Data needs no gradient: in most loops there is nothing to walk back from.
            use.trains = self._trains if True in map(_NEEDS_GRADIENT, tensors) else None
            if use.trains is not None and feeds_back(tensors, type(module).__name__):
                changed = inputs, keywords = unscale(inputs, use), unscale(keywords, use)
        if self._watch is not None and self._watch.marks:
            self._watch.mark(module, inputs, keywords)
        return changed

    def __call__(self, module: torch.nn.Module, inputs: Any, keywords: Any, output: Any) -> Any:
        """Return ``output``, scaled where a step is under way."""
        use, self.use = self.use, None
        if use is None:
            return output
        self._steps.end_use()
        if use.reduces:
            awaited = self.awaited
            if awaited and not (awaited[-1].reduces and self._waits()):
                awaited.clear()
            awaited.append(use)
        if not self._weighs:
            return output
        scaled, count = scale(output, use, self._backward)
        # A model that is frozen for a while, such as a critic's for its generator, gives none.
        if not count and module.training and any(p.requires_grad for p in module.parameters()):
            raise invalid(
                f"{type(module).__name__}.forward(...)",
                "return a tensor that needs a gradient, by itself or in a container",
                f"{type(output).__name__} without one",
                "Unfreeze a parameter, leave `torch.no_grad()`, or prepare with "
                "`prepare(..., weighting='loss')` and use `balancer.weight(loss)`.",
            )
        return scaled

    def _trains(self) -> bool:
        """Return whether the backward under way is for parameters, as far as can be seen."""
        return self._ddp is None or adds_to(self._ddp.parameters())

    def _waits(self) -> bool:
        """Return whether DDP waits for a backward still, of one of the newest forwards."""
        for use in self.awaited:
            if not use.reduces:
                return False
        return bool(self.awaited)


def feeds_back(tensors: list[torch.Tensor], name: str) -> bool:
    """Return whether one of ``tensors`` was computed from a scaled output.

    Walks the autograd graph back to scaled outputs, which inputs rarely have: data needs none.

    Args:
        tensors: inputs of a forward.
        name: of the model, for the error.

    Raises:
        ValueError: parameters that are not balanced lie in between: their weight is unknown.
    """
    names = {node.name() for node in nodes_behind(tensors, _SCALED)}
    found = not names.isdisjoint(_SCALED)
    if found and "torch::autograd::AccumulateGrad" in names:
        raise invalid(
            f"{name}.forward(...)",
            "get an output of a balanced model without other parameters in between",
            "an output that went through a layer that is not balanced",
            "Prepare that layer too, or prepare with `prepare(..., weighting='loss')` and use "
            "`balancer.weight(loss)`.",
        )
    return found
