"""Parameters of models that were not prepared, and are trained in steps: no weight reaches them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..._private_torch import at_end_of_backward, backward_number
from ..._warning import warn
from .._step._conductor import StepConductor
from ._weighting import Backward

_TRIAL = 3  # steps of an optimizer in a look
_SECOND_LOOK = 8  # its step; each look after that comes at twice the steps


class Others:
    """Warns once of a parameter that an optimizer trains and no prepared model has.

    As of a critic or a head in a DDP of its own, of which `prepare` was not told. A gradient that
    comes before the backward has come to a balanced output has no weight; what lies before a
    balanced model is weighted with it. A gradient that a script fills in, as for copies in single
    precision, comes by no backward. Each optimizer is looked at in its first steps, whenever those
    are, and ever more rarely later: it may get other parameters.

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
        self._is_over = False
        self._looks: WeakKeyDictionary[torch.optim.Optimizer, _Look] = WeakKeyDictionary()
        self._hook = _optimizer_hook(weakref.ref(self))

    def release(self) -> None:
        """Take the hooks off."""
        self._hook.remove()
        self._end()

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Look what an optimizer is about to change; at a step of it within one of the run."""
        look = self._looks.get(optimizer)
        if look is not None and look.rests:
            look.rests -= 1
            return
        if self._is_over or self._steps.num_samples is None or backward_number() >= 0:
            return
        if look is None:
            look = self._looks[optimizer] = _Look()
        if look.goes_on():
            self._watch(optimizer, look.watched)

    def _watch(self, optimizer: torch.optim.Optimizer, watched: dict[int, Any]) -> None:
        parameters = self._parameters()
        assert parameters is not None, "prepared models hold this"
        own = set(map(id, parameters()))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                is_trained = parameter.requires_grad and parameter.grad is not None
                if is_trained and id(parameter) not in own and id(parameter) not in watched:
                    handle = parameter.register_post_accumulate_grad_hook(self._ready)
                    watched[id(parameter)] = handle

    def _end(self) -> None:
        self._is_over = True
        for look in self._looks.values():
            look.end()

    def _ready(self, parameter: torch.Tensor) -> None:
        is_weighted = self._backward.task is not None or Backward.newest_task == backward_number()
        if self._is_over or is_weighted or self._steps.num_samples is None:
            return
        self._is_over = True
        at_end_of_backward(self._end)  # not under the engine's feet
        warn(
            f"An optimizer trains parameters of shape {tuple(parameter.shape)} that belong to no "
            f"prepared model, in a loop over a prepared loader. Their gradient is not weighted, so "
            f"it depends on how batches are split. Prepare that model too, "
            f"`balancer.prepare(model, other, loader)`, which averages its gradient over ranks as "
            f"well. If it is in a DDP of its own, `prepare(..., weighting='loss')` and "
            f"`balancer.weight(loss)` do too."
        )


class _Look:
    """Which steps of an optimizer are looked at, and the hooks on what it trains.

    Attributes:
        rests: steps from here on that are not looked at.
        watched: the hooks, by the id of the parameter.
    """

    def __init__(self) -> None:
        self._num_looks, self._next = 0, _SECOND_LOOK
        self.rests = 0
        self.watched: dict[int, Any] = {}

    def goes_on(self) -> bool:
        """Count a step, and tell whether it is looked at."""
        if self._num_looks < _TRIAL:
            self._num_looks += 1
            return True
        self.end()
        # This step is none that is looked at; nor are those up to the next look.
        done = _TRIAL if self._next == _SECOND_LOOK else self._next // 2 + _TRIAL
        self.rests, self._num_looks = self._next - done - 1, 0
        self._next *= 2
        return False

    def end(self) -> None:
        """Take the hooks off."""
        for handle in self.watched.values():
            handle.remove()
        self.watched.clear()


def _optimizer_hook(others: weakref.ref[Others]) -> Any:
    """Have them hear of the steps of all optimizers of this process, as long as they live."""

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling() and (alive := others()) is not None:
            alive.look(optimizer)

    return register_optimizer_step_pre_hook(before)
