"""What the thread that trains does, noted as cheaply as can be: steps are made of it elsewhere."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, final

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._diagnosis import Phase
from .._private_torch import NodeHook, at_end_of_backward, backward_number
from ..torch._step._clock import AbstractClock
from ..torch._step._containers import input_size, tensors_in

Heard = tuple[str, Any, Any]
"""What was heard, the clock's mark of when, and more of it that cannot be known later."""


@final
class StepLog:
    """Sets a mark for all that the watch hears of, and makes nothing of it.

    Where a device works or the loop sleeps, nothing of ours is in the caches when we are called,
    and each function and object that is touched takes microseconds. So there are few here.

    Args:
        clock: sets the marks.
        counted_s: seconds of garbage collection, and of compiling, so far.
        guard: runs what is called back, so that no fault reaches the training.

    Attributes:
        clock: likewise.
        heard: the oldest first; to be taken away by what makes steps of it.
        thread_id: of the thread that trains: the one that made this.
        num_stepped: steps of optimizers so far.
    """

    def __init__(
        self,
        clock: AbstractClock,
        *,
        counted_s: Callable[[], tuple[float, float]],
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self.clock = clock
        self.heard: deque[Heard] = deque()
        self.thread_id = get_ident()
        self.num_stepped = 0
        self._counted_s, self._guard = counted_s, guard
        self._depth = 0  # of forwards under way; one that raised ends with the next batch
        self._task = -1  # the engine's number of the backward under way
        self._trained: weakref.ref[nn.Module] | None = None
        self._trains_in_eval = False
        self._evaluates = False  # whether the newest batch was for an evaluation
        self._node_hook = NodeHook(self._backward_entered)
        self._hooks = (
            register_optimizer_step_pre_hook(self._optimizer_reached),
            register_optimizer_step_post_hook(self._optimizer_left),
        )
        self._note("begins", counted_s())

    def mixes(self) -> None:
        """Take computing and waiting for one from now on: they cannot be told apart."""
        self._note("mixes")

    def input_begins(self) -> None:
        """Hear that a batch is asked for."""
        self._depth = 0
        self._evaluates = not is_grad_enabled() or self._is_in_eval()
        self._note("input", self._evaluates)

    def input_ends(self, *, is_there: bool) -> None:
        """Hear that it is there, or that there is none any more."""
        if self._evaluates:
            self._note("evaluation")
        elif is_there:
            self._note("batch", self._counted_s())
        else:
            self._note("no batch")

    def forward_begins(self, module: nn.Module, inputs: Any) -> None:
        """Hear that a model begins to compute; one inside of another is part of it."""
        self._depth += 1
        if self._depth > 1:
            return
        if not is_grad_enabled():
            self._note("evaluation")
            return
        mark = self.clock.mark()
        if self._trained is None or self._trained() is not module:
            self._trained = weakref.ref(module)
        self._trains_in_eval = not module.training
        size = input_size(tensors_in(inputs))
        self.heard.append(("forward", mark, (self._counted_s(), size)))

    def forward_ends(self, output: Any) -> None:
        """Hear that it is done, so that its backward will be heard of.

        By hooks on the nodes of the graph, which change nothing in it and return None: no view,
        and nothing on the tensors themselves that a pickle would meet.
        """
        self._depth = max(0, self._depth - 1)
        if is_grad_enabled() and not self._depth:
            for tensor in (output,) if type(output) is Tensor else tensors_in(output):
                if (node := tensor.grad_fn) is not None:
                    self._node_hook.put(node)

    def met(self, begin: Any) -> None:
        """Hear that others were waited for since a mark of the clock."""
        self.heard.append(("met", begin, self.clock.mark()))

    def enter(self, phase: Phase) -> None:
        """Hear that something else begins, such as a checkpoint."""
        if get_ident() == self.thread_id:
            self._note("enters", phase)

    def leave(self) -> None:
        """Hear that it is over."""
        if get_ident() == self.thread_id:
            self._note("leaves")

    def close(self) -> None:
        """Hear of optimizers no more."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, what: str, more: Any = None) -> None:
        self.heard.append((what, self.clock.mark(), more))

    def _is_in_eval(self) -> bool:
        """Tell whether a batch is for an evaluation, as far as can be known before its forward."""
        module = None if self._trained is None else self._trained()
        return module is not None and not module.training and not self._trains_in_eval

    def _backward_entered(self, _: Any) -> None:
        if (task := backward_number()) != self._task:
            self._task = task
            self._guard(self._begin_backward)

    def _begin_backward(self) -> None:
        self._note("backward")
        at_end_of_backward(self._own_backward_ended)

    def _own_backward_ended(self) -> None:
        """Hear of it before DDP waits for the others: asked for first, called first."""
        self._task = -1
        self._guard(self._begin_reduction)

    def _begin_reduction(self) -> None:
        self._note("reduction")
        at_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        self._guard(self._end_reduction)

    def _end_reduction(self) -> None:
        self._note("backward ended")

    def _optimizer_reached(self, *_: Any) -> None:
        if not is_dynamo_compiling() and get_ident() == self.thread_id:
            self._guard(self._begin_optimizer)

    def _begin_optimizer(self) -> None:
        self._note("enters", Phase.OPTIMIZER)

    def _optimizer_left(self, *_: Any) -> None:
        if not is_dynamo_compiling() and get_ident() == self.thread_id:
            self._guard(self._end_optimizer)

    def _end_optimizer(self) -> None:
        self.num_stepped += 1
        self._note("stepped")
