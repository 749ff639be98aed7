"""What the thread that trains does, noted as cheaply as can be: steps are made of it elsewhere."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, Protocol, final

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._diagnosis import Phase
from .._private_torch import NodeHook, at_end_of_backward, backward_number, original_of
from ..torch._step._clock import AbstractClock
from ..torch._step._containers import input_size, tensors_in

Heard = tuple[str, Any, Any]
"""What was heard, the clock's mark of when, and more of it that cannot be known later."""

_MOST_HEARD = 2048  # that the thread that sends has not taken: of 200 steps or so, 0.3 MB


class Guard(Protocol):
    """Calls for the thread that trains, so that no fault reaches the training."""

    def __call__(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call ``call(*arguments)``, or nothing once the watch is off."""


@final
class StepLog:
    """Sets a mark for all that the watch hears of, and makes nothing of it.

    Where a device works or the loop sleeps, nothing of ours is in the caches when we are called,
    and each function and object that is touched takes microseconds. So there are few here.

    Methods that hear of something are called by the guard.

    Args:
        clock: sets the marks.
        counted_s: seconds of garbage collection, and of compiling, so far.
        guard: runs what is called back.

    Attributes:
        clock, guard: likewise.
        heard: the oldest first; to be taken away by what makes steps of it.
        make_room: takes it away, where it is much.
        thread_id: of the thread that trains: the one that made this.
        num_stepped: steps of optimizers so far.
        meets: whether others are waited for.
    """

    def __init__(
        self,
        clock: AbstractClock,
        *,
        counted_s: Callable[[], tuple[float, float]],
        guard: Guard,
    ) -> None:
        self.clock, self.guard = clock, guard
        self.heard: deque[Heard] = deque()
        self.make_room: Callable[[], None] = lambda: None
        self.thread_id = get_ident()
        self.num_stepped = 0
        self.meets = False
        self._mark, self._counted_s = clock.mark, counted_s
        self._depth = 0  # of forwards under way; one that raised ends with the next batch
        self._task = -1  # the engine's number of the backward under way
        self._heard_of: Callable[[], nn.Module | None] = lambda: None  # the newest forward's
        self._trained: Callable[[], nn.Module | None] = self._heard_of  # or the model in its DDP
        self._trains_in_eval = False
        self._evaluates = False  # whether the newest batch was for an evaluation
        self._put_hook = NodeHook(self._backward_entered).put
        self._own_backward_ended = partial(guard, self._go_on, "reduction")
        self._backward_ended = partial(guard, self._note, "backward ended")
        self._hooks = (
            register_optimizer_step_pre_hook(self._optimizer_reached),
            register_optimizer_step_post_hook(self._optimizer_left),
        )
        self._note("begins", counted_s())

    @property
    def evaluates(self) -> bool:
        """Whether the newest batch was for an evaluation."""
        return self._evaluates

    def mixes(self) -> None:
        """Take computing and waiting for one from now on: they cannot be told apart."""
        self._note("mixes")

    def input_begins(self) -> None:
        """Hear that a batch is asked for."""
        self._depth = 0
        trained = self._trained()  # whether it evaluates, as far as is known before its forward
        is_in_eval = trained is not None and not trained.training and not self._trains_in_eval
        self._evaluates = is_in_eval or not is_grad_enabled()
        self._note("input", self._evaluates)

    def input_ends(self, is_there: bool) -> None:
        """Hear that it is there, or that there is none any more."""
        if self._evaluates:
            self._note("evaluation")
        elif is_there:
            self._note("batch", self._counted_s())
        else:
            self._note("no batch")

    def forward_begins(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Hear that a model begins to compute; one inside of another is part of it.

        A shape is all that is read of a single input; its size is known from it later.
        """
        self._depth += 1
        if self._depth > 1:
            return
        if len(self.heard) >= _MOST_HEARD:
            self.make_room()
        if not is_grad_enabled():
            self._note("evaluation")
            return
        mark = self._mark()
        if self._heard_of() is not module:
            self._heard_of, self._trained = weakref.ref(module), weakref.ref(_model_in(module))
        self._trains_in_eval = (trained := self._trained()) is not None and not trained.training
        is_plain = len(inputs) == 1 and type(inputs[0]) is Tensor and not inputs[0].is_nested
        size = inputs[0].shape if is_plain else input_size(tensors_in(inputs))
        self.heard.append(("forward", mark, (self._counted_s(), size)))

    def forward_ends(self, output: Any) -> None:
        """Hear that it is done, so that its backward will be heard of.

        By hooks on the nodes of the graph, which change nothing in it and return None: no view,
        and nothing on the tensors themselves that a pickle would meet.
        """
        if self._depth:
            self._depth -= 1
        if is_grad_enabled() and not self._depth:
            for tensor in (output,) if type(output) is Tensor else tensors_in(output):
                if (node := tensor.grad_fn) is not None:
                    self._put_hook(node)

    def met(self, begin: Any) -> None:
        """Hear that others were waited for since a mark of the clock."""
        self.meets = False
        self.heard.append(("met", begin, self._mark()))

    def enter(self, phase: Phase) -> None:
        """Hear that something else begins, such as a checkpoint."""
        self._note("enters", phase)

    def leave(self) -> None:
        """Hear that it is over."""
        self._note("leaves")

    def close(self) -> None:
        """Hear of optimizers no more."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, what: str, more: Any = None) -> None:
        self.heard.append((what, self._mark(), more))

    def _backward_entered(self, _: Any) -> None:
        if (task := backward_number()) != self._task:
            self._task = task
            self.guard(self._go_on, "backward")

    def _go_on(self, what: str) -> None:
        """Hear of a part of the backward.

        Of the end of the own one before DDP waits for the others: asked for first, called first.
        """
        self._note(what)
        is_own = what == "backward"
        at_end_of_backward(self._own_backward_ended if is_own else self._backward_ended)

    def _optimizer_reached(self, *_: Any) -> None:
        if not is_dynamo_compiling() and get_ident() == self.thread_id:
            self.guard(self._note, "enters", Phase.OPTIMIZER)

    def _optimizer_left(self, *_: Any) -> None:
        if not is_dynamo_compiling() and get_ident() == self.thread_id:
            self.num_stepped += 1
            self.guard(self._note, "stepped")


def _model_in(module: nn.Module) -> nn.Module:
    """Return the model in a DDP, whose mode counts: libraries switch that one alone."""
    original = original_of(module)
    if isinstance(original, DistributedDataParallel):
        original = original_of(original.module)
    return original
