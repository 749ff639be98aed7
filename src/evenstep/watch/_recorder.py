"""One rank's steps as they are seen from outside: a timeline, and clues beside it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._diagnosis import Phase, StepClues
from .._private_torch import at_end_of_backward, backward_number
from ..torch._step._clock import AbstractClock
from ..torch._step._containers import input_size, tensors_in
from ..torch._step._phases import Timeline
from ._step_records import StepRecord

_MOST_UNSENT = 8192  # records that the thread that sends has not taken yet
_MANY = 64  # backwards without any step of an optimizer: then each ends a step


@final
class StepRecorder:
    """Marks where the time of this rank's steps goes, by what the watch is told of.

    A step lasts from the hand-out of a batch, or a forward where no loader is seen, to the first
    such after an optimizer's step that had a backward before it: as a balanced run has it, with
    all micro-batches of a step in it. Its number is the same on all ranks, as all have the same
    backwards. Where no optimizer is seen, as one that is compiled, each backward ends a step.

    What is done between the hand-out of a batch and the forward counts as forward, and so does
    the loss. Where no loader is seen it is the rest.

    Args:
        clock: sets the marks.
        gc_s: seconds of garbage collection so far.
        compile_s: seconds of compiling so far.
        guard: runs what is called back, so that no fault reaches the training.

    Attributes:
        step: the one under way, from 0.
        records: of steps that are over, for another thread to take.
    """

    def __init__(
        self,
        clock: AbstractClock,
        *,
        gc_s: Callable[[], float],
        compile_s: Callable[[], float],
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self.clock = clock
        self.step = 0
        self.records: deque[StepRecord] = deque(maxlen=_MOST_UNSENT)
        self._guard = guard
        self._timeline = Timeline(clock)
        self._gc_s, self._compile_s = gc_s, compile_s
        self._gc_before, self._compile_before = gc_s(), compile_s()
        self._thread_id = threading.get_ident()
        self._clues: dict[int, tuple[StepClues, int]] = {}  # by step, until its times are known
        self._size = self._num_samples = 0
        self._handed_out = -1  # the mark of the hand-out before the forward; -1 is none
        self._depth = 0  # of forwards under way; one that raised ends with the next batch
        self._task = -1  # the engine's number of the backward under way
        self._num_backwards = 0  # since a step of an optimizer
        self._sees_optimizer = False
        self._had_backward = self._is_due = False  # whether the next hand-out begins a step
        self._trained: weakref.ref[nn.Module] | None = None
        self._trains_in_eval = False
        self._timeline.begin(0)
        self._hook = register_optimizer_step_post_hook(self._optimizer_stepped)

    @property
    def on_thread(self) -> bool:
        """Whether the caller is on the thread that trains."""
        return threading.get_ident() == self._thread_id

    def mixes(self) -> None:
        """Take computing and waiting for one: they cannot be told apart."""
        self._timeline.mixes = True

    def input_begins(self) -> None:
        """Hear that a batch is asked for."""
        self._handed_out, self._depth = -1, 0
        self._timeline.cut(Phase.EVALUATION if self._evaluates() else Phase.INPUT)

    def input_ends(self, *, is_there: bool) -> None:
        """Hear that it is there, or that there is none any more."""
        if self._evaluates():
            self._timeline.cut(Phase.EVALUATION)
        elif not is_there:
            self._timeline.cut(Phase.REST)
        elif self._ends_step():
            self._handed_out = 0
        else:
            self._handed_out = self._timeline.cut(Phase.REST)

    def forward_begins(self, module: nn.Module, inputs: Any) -> None:
        """Hear that a model begins to compute; one inside of another is part of it."""
        self._depth += 1
        if self._depth > 1:
            return
        if not torch.is_grad_enabled():
            self._timeline.cut(Phase.EVALUATION)
            return
        self._ends_step()
        if self._handed_out >= 0:
            self._timeline.was(Phase.FORWARD, self._handed_out)
            self._handed_out = -1
        self._timeline.cut(Phase.FORWARD)
        if self._trained is None or self._trained() is not module:
            self._trained = weakref.ref(module)
        self._trains_in_eval = not module.training
        num_samples, size = input_size(tensors_in(inputs))
        self._num_samples += num_samples
        self._size += size

    def forward_ends(self, output: Any) -> None:
        """Hear that it is done, so that its backward will be heard of.

        By hooks on the nodes of the graph, which change nothing in it and return None: no view,
        and nothing on the tensors themselves that a pickle would meet.
        """
        self._depth = max(0, self._depth - 1)
        if torch.is_grad_enabled() and not self._depth:
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(self._backward_entered)

    def met(self, begin: Any, end: Any) -> None:
        """Hear that others were waited for between two marks of the clock."""
        self._timeline.met(begin, end)

    def enter(self, phase: Phase) -> None:
        """Hear that something else begins, such as a checkpoint."""
        self._timeline.enter(phase)

    def leave(self) -> None:
        """Hear that it is over."""
        self._timeline.leave()

    def close(self) -> None:
        """Hear of optimizers no more."""
        self._timeline.close()
        self._hook.remove()

    def _evaluates(self) -> bool:
        """Tell whether a batch is for an evaluation, as far as can be known before its forward."""
        if not torch.is_grad_enabled():
            return True
        module = None if self._trained is None else self._trained()
        return module is not None and not module.training and not self._trains_in_eval

    def _backward_entered(self, *_: Any) -> None:
        if (task := backward_number()) != self._task:
            self._task = task
            self._guard(self._begin_backward)

    def _begin_backward(self) -> None:
        self._timeline.cut(Phase.BACKWARD)
        at_end_of_backward(self._own_backward_ended)

    def _own_backward_ended(self) -> None:
        """Hear of it before DDP waits for the others: asked for first, called first."""
        self._task = -1
        self._guard(self._begin_reduction)

    def _begin_reduction(self) -> None:
        self._timeline.cut(Phase.REDUCTION)
        at_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        self._had_backward = True
        self._num_backwards += 1
        self._guard(self._end_reduction)

    def _end_reduction(self) -> None:
        self._timeline.cut(Phase.REST)

    def _optimizer_stepped(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self.on_thread:
            self._sees_optimizer = True
            self._is_due |= self._had_backward
            self._had_backward = False

    def _ends_step(self) -> bool:
        """End the step under way if it is done; return whether it was."""
        sees_none = not self._sees_optimizer and self._num_backwards >= _MANY
        if not (self._is_due or (self._had_backward and sees_none)):
            return False
        self._is_due = self._had_backward = False
        self._end_step()
        return True

    def _end_step(self) -> None:
        gc_s, compile_s = self._gc_s(), self._compile_s()
        clues = StepClues(
            gc_us=round((gc_s - self._gc_before) * 1e6),
            compile_us=round((compile_s - self._compile_before) * 1e6),
            size=self._size,
        )
        self._clues[self.step] = clues, self._num_samples
        self._gc_before, self._compile_before = gc_s, compile_s
        self._size = self._num_samples = 0
        self._handed_out = -1
        self.step += 1
        self._timeline.begin(self.step)
        for step, spent_us in self._timeline.take():
            while (known := next(iter(self._clues))) < step:  # one whose clock went back
                del self._clues[known]
            self.records.append(StepRecord(step, 1, spent_us, *self._clues.pop(step)))
