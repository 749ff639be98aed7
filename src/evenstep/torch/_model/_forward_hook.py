"""What runs at a balanced model's forward: it finds the batch, and weights the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...exceptions import invalid
from .._containers import tensors_in
from ._protocols import ModelSession, Use
from ._weighting import Backward, InertHook, scale, unscale


class ForwardHook:
    """Forward hooks for the user's outermost module.

    Args:
        session: has the steps, which are told of forwards.
        backward: told at every backward through the output.
        model: the model's number, in the order of ``prepare``.
        weighs: whether the output is scaled; ``Balancer.weight`` does it otherwise.
        reduces: whether a backward of a forward made now reduces gradients.
    """

    def __init__(
        self,
        session: ModelSession,
        backward: Backward,
        *,
        model: int = 0,
        weighs: bool = True,
        reduces: Callable[[], bool | None] = lambda: None,
    ) -> None:
        self._session = session
        self._backward = backward
        self._model = model
        self._weighs = weighs
        self._reduces = reduces
        self._use: Use | None = None

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()  # `copy.deepcopy(model)` and `torch.save(model)` leave the run behind

    def before(self, module: torch.nn.Module, inputs: Any, keywords: Any) -> Any:
        """Learn whose batch this is; take the weight out of gradients that go back to an output."""
        self._use = None
        if not torch.is_grad_enabled():
            return None
        tensors = tensors_in((inputs, keywords) if keywords else inputs)
        use = self._session.steps.begin_use(self._model, tensors, reduces=self._reduces())
        self._use = use
        if use is None and module.training:
            self._session.steps.outside()
        if use is None or not self._weighs or not feeds_back(tensors, type(module).__name__):
            return None
        return unscale(inputs, use), unscale(keywords, use)

    def __call__(self, module: torch.nn.Module, inputs: Any, keywords: Any, output: Any) -> Any:
        """Return ``output``, scaled where a step is under way."""
        use, self._use = self._use, None
        if use is None:
            return output
        self._session.steps.end_use()
        if not self._weighs:
            return output
        scaled, count = scale(output, use, self._backward)
        if not count and module.training:
            raise invalid(
                f"{type(module).__name__}.forward(...)",
                "return a tensor that needs a gradient, by itself or in a container",
                f"{type(output).__name__} without one",
                "Unfreeze a parameter, leave `torch.no_grad()`, or prepare with "
                "`prepare(..., weighting='loss')` and use `balancer.weight(loss)`.",
            )
        return scaled


def feeds_back(tensors: list[torch.Tensor], name: str) -> bool:
    """Tell whether one of ``tensors`` was computed from a scaled output.

    Walks the autograd graph back to scaled outputs, which inputs rarely have: data needs none.

    Args:
        tensors: inputs of a forward.
        name: of the model, for the error.

    Raises:
        ValueError: parameters that are not balanced lie in between: their weight is unknown.
    """
    queue: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    if not queue:
        return False
    seen: set[Any] = set()
    found = others = False
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "_OutputScaleBackward":
            found = True
            continue
        others |= node.name() == "torch::autograd::AccumulateGrad"
        queue.extend(parent for parent, _ in node.next_functions)
    if found and others:
        raise invalid(
            f"{name}.forward(...)",
            "get an output of a balanced model without other parameters in between",
            "an output that went through a layer that is not balanced",
            "Prepare that layer too, or prepare with `prepare(..., weighting='loss')` and use "
            "`balancer.weight(loss)`.",
        )
    return found
