"""What is looked at in a run for mistakes: its models, its optimizers, and how it ends."""

from __future__ import annotations

import math
import os
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from ..._private_torch import at_end_of_backward, backward_number, version_of
from ..._warning import OneWarning, warn
from .._data._step import StepCount
from .._model._models import BalancedModel, PreparedModels
from .._model._nested import NestedBackwards
from .._model._weighting import Backward
from .._step._conductor import StepConductor
from .._step._looks import Looks
from ._carried import watch_states
from ._submodule_calls import SubmoduleCalls


class Checks(Looks):
    """Looks for mistakes that would change the result, and that nothing else says.

    Args:
        models: all that were prepared.
        steps: have samples while one is under way.
        backward: knows whether the backward under way has come to a balanced output.
        count: steps of the run so far.
    """

    def __init__(
        self, models: PreparedModels, steps: StepConductor, backward: Backward, count: StepCount
    ) -> None:
        super().__init__()
        self._steps = steps
        self._unused = Unused(count)
        weakref.finalize(self, self._unused.close)  # at the end of a script that closes nothing
        self._states: list[RemovableHandle] = []
        self._looking: list[SubmoduleCalls | NestedBackwards] = []
        self._unprepared = UnpreparedParameters(models, steps, backward)
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
        if self._has_unequal:
            self._unprepared.look(optimizer)

    def close(self) -> None:
        """Take all hooks off, and say if the models were trained past the balancer."""
        self._unused.close()
        self._unprepared.close()
        for one in self._looking:
            one.end()
        for hook in self._states:
            hook.remove()
        self._looking.clear()
        self._states.clear()
        self.due = math.inf


class UnpreparedParameters:
    """Warns once of a parameter that an optimizer trains and no prepared model has.

    Such a parameter is one of a critic or a head in a DDP of its own, which `prepare` was not
    given. A gradient that comes before the backward has come to a balanced output has no weight;
    what lies before a balanced model is weighted with it. A gradient that a script fills in, as for
    copies in single precision, comes by no backward.

    Args:
        models: all that were prepared.
        steps: have samples while one is under way.
        backward: knows whether the backward under way has come to a balanced output.
    """

    def __init__(self, models: PreparedModels, steps: StepConductor, backward: Backward) -> None:
        self._models = models
        self._steps = steps
        self._backward = backward
        self._warn = OneWarning()
        self._handles: dict[int, Any] = {}  # by the id of the parameter, until its next gradient

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook the next gradient of each parameter that an optimizer is about to change."""
        if self._warn.said:
            return
        own = set(map(id, self._models.parameters()))
        for group in optimizer.param_groups:
            for one in group["params"]:
                is_trained = one.requires_grad and one.grad is not None
                if is_trained and id(one) not in own and id(one) not in self._handles:
                    self._handles[id(one)] = one.register_post_accumulate_grad_hook(self._ready)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _ready(self, parameter: torch.Tensor) -> None:
        at_end_of_backward(self._handles.pop(id(parameter)).remove)  # not under the engine's feet
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
