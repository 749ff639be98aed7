"""Parameters of models that were not prepared, and are trained in steps: no weight reaches them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..._private_torch import backward_number
from ...exceptions import EvenstepWarning
from .._step._conductor import StepConductor
from ._weighting import Backward

_TRIAL = 3  # steps of optimizers after which a script is believed to train nothing else


class Others:
    """Warns once of a parameter that an optimizer trains and no prepared model has.

    As of a critic or a head in a DDP of its own, of which `prepare` was not told. A gradient that
    comes before the backward has come to a balanced output has no weight; what lies before a
    balanced model is weighted with it. A gradient that a script fills in, as for copies in single
    precision, comes by no backward.

    Args:
        parameters: method that returns those of the prepared models.
        steps: have samples while one is under way.
        backward: knows whether the backward under way has come to a balanced output.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.Tensor]],
        steps: StepConductor,
        backward: Backward,
    ) -> None:
        self._parameters = weakref.WeakMethod(parameters)  # or models would outlive a lost balancer
        self._steps = steps
        self._backward = backward
        self._num_left = _TRIAL
        self._newest = -1
        self._watched: dict[int, Any] = {}
        self._hook = _optimizer_hook(weakref.ref(self))

    def release(self) -> None:
        """Take the hooks off."""
        self._hook.remove()
        self._end()

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Look what an optimizer is about to change; at a step of it within one of the run."""
        if not self._num_left or self._steps.num_samples is None or backward_number() >= 0:
            return
        if self._newest != self._steps.num_steps:
            self._newest = self._steps.num_steps
            self._num_left -= 1
        if not self._num_left:
            self._end()  # and the hook stays: torch is going through them
            return
        parameters = self._parameters()
        assert parameters is not None, "prepared models hold this"
        own = set(map(id, parameters())) | self._watched.keys()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                trained = parameter.requires_grad and parameter.grad is not None
                if trained and id(parameter) not in own:
                    handle = parameter.register_post_accumulate_grad_hook(self._ready)
                    self._watched[id(parameter)] = handle

    def _end(self) -> None:
        self._num_left = 0
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def _ready(self, parameter: torch.Tensor) -> None:
        is_weighted = self._backward.task is not None or Backward.newest_task == backward_number()
        if not self._num_left or is_weighted or self._steps.num_samples is None:
            return
        self._num_left = 0
        warnings.warn(
            f"An optimizer trains parameters of shape {tuple(parameter.shape)} that belong to no "
            f"prepared model, in a loop over a prepared loader. Their gradient is not weighted, so "
            f"it depends on how batches are split. Prepare that model too, "
            f"`balancer.prepare(model, other, loader)`, or use `prepare(..., weighting='loss')` "
            f"and `balancer.weight(loss)`.",
            EvenstepWarning,
            stacklevel=2,
        )


def _optimizer_hook(others: weakref.ref[Others]) -> Any:
    """Have them hear of the steps of all optimizers of this process, as long as they live."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling() and (alive := others()) is not None:
            alive.look(optimizer)

    return register_optimizer_step_pre_hook(before)
