"""The hooks at a model's forward: whose batch it has, and the weight at its output."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ...exceptions import invalid
from .._step._compile_watch import CompileWatch
from .._step._conductor import StepConductor
from .._step._containers import tensors_in
from .._step._strange_rows import StrangeRows
from .._step._unknown_weights import not_averaged
from .._step._uses import ForwardUse
from ._weighting import Backward, feeds_back, scale, unscale

_MOST_AWAITED = 64  # forwards of one step


class ForwardHook:
    """Forward hooks for the user's outermost module.

    Args:
        steps: are told of forwards.
        backward: told at every backward through the output.
        watch: marks inputs, where the model is compiled after it was prepared; None leaves that to
            another hook.
        model: the model's number, in the order of ``prepare``.
        weighs: whether the output is scaled; ``Balancer.weight`` does it otherwise.
        reduces: whether a backward of a forward made now reduces gradients.

    Attributes:
        use: the forward under way; None outside of one, or of a step.
    """

    def __init__(
        self,
        steps: StepConductor,
        backward: Backward,
        watch: CompileWatch | None = None,
        *,
        model: int = 0,
        weighs: bool = True,
        reduces: Callable[[], bool | None] = lambda: None,
    ) -> None:
        self._steps = steps
        self._backward = backward
        self._watch = watch
        self._model = model
        self._weighs = weighs
        self._reduces = reduces
        self._strange = StrangeRows()
        self._awaited: deque[ForwardUse] = deque(maxlen=_MOST_AWAITED)  # the newest that reduce
        self.use: ForwardUse | None = None

    def before(self, module: torch.nn.Module, inputs: Any, keywords: Any) -> Any:
        """Learn whose batch this is; take the weight out of gradients that go back to an output."""
        self.use = None
        if not torch.is_grad_enabled():
            return None
        tensors = tensors_in((inputs, keywords) if keywords else inputs)
        use = self.use = self._steps.begin_use(self._model, tensors, reduces=self._reduces())
        if use is None and module.training:
            self._steps.outside()
        if use is not None and use.reduces is False and not use.ticket.is_last and self._waits():
            use.weight = not_averaged
        changed = None
        if use is not None and self._weighs:
            if use.match.other_rows:
                self._strange.look(use, tensors)
            if feeds_back(tensors, type(module).__name__):
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
            if not self._waits():
                self._awaited.clear()
            self._awaited.append(use)
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

    def awaited(self) -> list[ForwardUse]:
        """Return the forwards whose backward DDP waits for."""
        return [use for use in self._awaited if use.reduces]

    def _waits(self) -> bool:
        """Tell whether DDP waits for a backward still, of one of the newest forwards."""
        return bool(self._awaited) and all(use.reduces for use in self._awaited)
