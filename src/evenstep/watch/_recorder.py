"""One rank's steps as seen from outside: noted as cheaply as can be, and made records elsewhere."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, final

from torch import Size, Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._diagnosis import Phase, StepClues
from .._nested_tensors import input_size, tensors_in
from .._private_torch import NodeHook, at_end_of_backward, backward_number, original_of
from .._torch_clock import AbstractClock, Timeline
from ._step_records import StepRecord

Noted = tuple[Callable[["StepRecorder", Any, Any], None], Any, Any]
"""What reads it, the clock's mark of when, and more of it that cannot be known later."""

_MOST_NOTED = 2048  # that the thread that sends has not taken: of 200 steps or so, 0.3 MB


@final
class StepLog:
    """Sets a mark for all that the watch is notified of, and makes nothing of it.

    Where a device works or the loop sleeps, nothing of ours is in the caches when we are called,
    and each function and object that is touched takes microseconds. So there are few here.

    Methods that note something are called by the guard.

    Args:
        clock: sets the marks.
        counted_s: seconds of garbage collection, and of compiling, so far.
        guard: calls what it is given with arguments, so that no fault reaches the training; calls
            nothing once the watch is off.

    Attributes:
        clock, guard: likewise.
        noted: the oldest first; to be taken away by what makes steps of it.
        make_room: takes it away, where it is much.
        thread_id: of the thread that trains: the one that made this.
        num_stepped: steps of optimizers so far.
        meets: whether others are waited for.
        evaluates: whether the newest batch was for an evaluation.
    """

    def __init__(
        self,
        clock: AbstractClock,
        *,
        counted_s: Callable[[], tuple[float, float]],
        guard: Callable[..., None],
    ) -> None:
        self.clock, self.guard = clock, guard
        self.noted: deque[Noted] = deque()
        self.make_room: Callable[[], None] = lambda: None
        self.thread_id = get_ident()
        self.num_stepped = 0
        self.meets = False
        self._mark, self._counted_s = clock.mark, counted_s
        self._depth = 0  # of forwards under way; one that raised ends with the next batch
        self._task = -1  # the engine's number of the backward under way
        self._forwarded: Callable[[], nn.Module | None] = lambda: None  # the newest forward's
        self._trained: Callable[[], nn.Module | None] = self._forwarded  # or the model in its DDP
        self._trains_in_eval = False
        self.evaluates = False
        self._put_hook = NodeHook(self._backward_entered).put
        self._own_backward_ended = partial(guard, self._continue, Phase.REDUCTION)
        self._backward_ended = partial(guard, self._note, StepRecorder.end_backward)
        self._hooks = (
            register_optimizer_step_pre_hook(self._optimizer_reached),
            register_optimizer_step_post_hook(self._optimizer_left),
        )
        self._note(StepRecorder.begin, counted_s())

    def mixes(self) -> None:
        """Take computing and waiting for one from now on: they cannot be separated."""
        self._note(StepRecorder.mix)

    def input_begins(self) -> None:
        """Note that a batch is asked for."""
        self._depth = 0
        trained = self._trained()  # whether it evaluates, as far as is known before its forward
        is_in_eval = trained is not None and not trained.training and not self._trains_in_eval
        self.evaluates = is_in_eval or not is_grad_enabled()
        self._note(StepRecorder.ask, self.evaluates)

    def input_ends(self, is_there: bool) -> None:
        """Note that it is there, or that there is none any more."""
        if self.evaluates:
            self._note(StepRecorder.evaluate)
        elif is_there:
            self._note(StepRecorder.hand_out, self._counted_s())
        else:
            self._note(StepRecorder.cut, Phase.REST)

    def forward_begins(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note that a model begins to compute; one inside of another is part of it.

        A shape is all that is read of a single input; its size is known from it later.
        """
        self._depth += 1
        if self._depth > 1:
            return
        if len(self.noted) >= _MOST_NOTED:
            self.make_room()
        if not is_grad_enabled():
            self._note(StepRecorder.evaluate)
            return
        mark = self._mark()
        if self._forwarded() is not module:
            self._forwarded, self._trained = weakref.ref(module), weakref.ref(_model_in(module))
        self._trains_in_eval = (trained := self._trained()) is not None and not trained.training
        is_plain = len(inputs) == 1 and type(inputs[0]) is Tensor and not inputs[0].is_nested
        size = inputs[0].shape if is_plain else input_size(tensors_in(inputs))
        self.noted.append((StepRecorder.begin_forward, mark, (self._counted_s(), size)))

    def forward_ends(self, output: Any) -> None:
        """Note that it is done, and have its backward noted.

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
        """Note that others were waited for since a mark of the clock."""
        self.meets = False
        self.noted.append((StepRecorder.meet, begin, self._mark()))

    def enter(self, phase: Phase) -> None:
        """Note that something else begins, such as a checkpoint."""
        self._note(StepRecorder.enter, phase)

    def leave(self) -> None:
        """Note that it is over."""
        self._note(StepRecorder.leave)

    def close(self) -> None:
        """Note optimizers no more."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, read: Callable[[StepRecorder, Any, Any], None], more: Any = None) -> None:
        self.noted.append((read, self._mark(), more))

    def _backward_entered(self, _: Any) -> None:
        if (task := backward_number()) != self._task:
            self._task = task
            self.guard(self._continue, Phase.BACKWARD)

    def _continue(self, phase: Phase) -> None:
        """Note a part of the backward.

        Of the end of the own one before DDP waits for the others: asked for first, called first.
        """
        self._note(StepRecorder.cut, phase)
        is_own = phase is Phase.BACKWARD
        at_end_of_backward(self._own_backward_ended if is_own else self._backward_ended)

    def _optimizer_reached(self, *_: Any) -> None:
        if not is_dynamo_compiling() and get_ident() == self.thread_id:
            self.guard(self._note, StepRecorder.enter, Phase.OPTIMIZER)

    def _optimizer_left(self, *_: Any) -> None:
        if not is_dynamo_compiling() and get_ident() == self.thread_id:
            self.num_stepped += 1
            self.guard(self._note, StepRecorder.end_optimizer)


def _model_in(module: nn.Module) -> nn.Module:
    """Return the model in a DDP, whose mode counts: libraries switch that one alone."""
    original = original_of(module)
    if isinstance(original, DistributedDataParallel):
        original = original_of(original.module)
    return original


_MOST_MARKS = 10_000  # of a step: one that has more is left out, as it may never end
_MANY = 64  # backwards without a step of any optimizer, or on one batch: then each may end a step
_FEW = 8  # backwards on one batch, until a hand-out has ended a step


@final
class StepRecorder:
    """Finds out where the time of this rank's steps went, by what was noted on its thread.

    A step lasts from the hand-out of a batch, or a forward where no loader is seen, to the first
    such after an optimizer's step that had a backward before it: as a balanced run has it, with
    all micro-batches of a step in it. Its number is the same on all ranks, as all have the same
    backwards. Where no optimizer is seen, as one that is compiled, each backward ends a step.

    A loader is seen while it hands out batches, so all updates on one batch belong to one step, as
    those of two optimizers. It is not seen past its end, nor past a batch that seemed to be for an
    evaluation, nor where one batch had so many backwards that the loop has others.

    What is done between the hand-out of a batch and the forward counts as forward, and so does
    the loss. Where no loader is seen it is the rest.

    Args:
        log: of the thread that trains.
        record: takes a step that is over.

    Attributes:
        step: the one under way, from 0, as far as the log was gone through.
    """

    def __init__(self, log: StepLog, record: Callable[[StepRecord], None]) -> None:
        self.step = 0
        self._noted = log.noted
        log.make_room = self.catch_up
        self._timeline = Timeline(log.clock)
        self._lock = threading.Lock()
        self._record = record
        self._counted_s = (0.0, 0.0)  # of garbage and compiling, when the step began
        self._clues: dict[int, tuple[StepClues, int]] = {}  # by step, until its times are known
        self._size = self._num_samples = 0
        self._handed_out = -1  # the mark of the hand-out before the forward; -1 is none
        self._num_backwards = 0
        self._most_on_batch = _FEW
        self._fed_until = 0  # how many backwards; before, no forward ends a step
        self._sees_optimizer = False
        self._had_backward = self._is_due = False  # whether the next hand-out begins a step

    @property
    def phase(self) -> Phase:
        """The phase under way, as far as the log was gone through."""
        return Phase.FORWARD if self._handed_out >= 0 else self._timeline.phase

    def catch_up(self) -> None:
        """Go through what was noted since the last call, on whatever thread."""
        with self._lock:
            while self._noted:
                read, mark, more = self._noted.popleft()
                read(self, mark, more)
                if self._timeline.num_marks > _MOST_MARKS:
                    self._timeline.drop()

    def begin(self, mark: Any, counted_s: tuple[float, float]) -> None:
        """Begin the first step, as its log does."""
        self._counted_s = counted_s
        self._timeline.begin(0, at=mark)

    def ask(self, mark: Any, evaluates: bool) -> None:
        """Go over to waiting for a batch, or to an evaluation that asks for one."""
        self._handed_out, self._fed_until = -1, 0
        if evaluates:
            self._timeline.go(Phase.EVALUATION, at=mark)
        else:
            self._timeline.cut(Phase.INPUT, at=mark)

    def hand_out(self, mark: Any, counted_s: tuple[float, float]) -> None:
        """Note a batch, with which a step may begin."""
        is_new = self._ends_step(mark, counted_s)
        if is_new:
            self._most_on_batch = _MANY
        self._fed_until = self._num_backwards + self._most_on_batch
        self._handed_out = 0 if is_new else self._timeline.cut(Phase.REST, at=mark)

    def evaluate(self, mark: Any, _: None) -> None:
        """Go over to an evaluation: one mark, however long it is."""
        self._timeline.go(Phase.EVALUATION, at=mark)

    def cut(self, mark: Any, phase: Phase) -> None:
        """Go over to a phase."""
        self._timeline.cut(phase, at=mark)

    def meet(self, begin: Any, end: Any) -> None:
        """Note a wait for others."""
        self._timeline.met(begin, end)

    def mix(self, mark: Any, _: None) -> None:
        """Take computing and waiting for one from now on."""
        self._timeline.mixes = True

    def enter(self, mark: Any, phase: Phase) -> None:
        """Begin a block, such as a checkpoint."""
        self._timeline.enter(phase, at=mark)

    def leave(self, mark: Any, _: None) -> None:
        """End it."""
        self._timeline.leave(at=mark)

    def end_backward(self, mark: Any, _: None) -> None:
        """Note that a backward is over."""
        self._had_backward = True
        self._num_backwards += 1
        self._timeline.cut(Phase.REST, at=mark)

    def end_optimizer(self, mark: Any, _: None) -> None:
        """Note an optimizer's step, which ends this one if it had a backward before it."""
        self._sees_optimizer = True
        self._is_due |= self._had_backward
        self._had_backward = False
        self._timeline.leave(at=mark)

    def begin_forward(
        self, mark: Any, more: tuple[tuple[float, float], Size | tuple[int, int]]
    ) -> None:
        """Go over to a forward, with which a step may begin where no loader is seen."""
        counted_s, size = more
        if self._num_backwards >= self._fed_until:
            self._ends_step(mark, counted_s)
        if self._handed_out >= 0:
            self._timeline.was(Phase.FORWARD, self._handed_out)
            self._handed_out = -1
        self._timeline.cut(Phase.FORWARD, at=mark)
        if type(size) is Size:
            size = (size[0], size.numel()) if size else (0, 0)
        self._num_samples += size[0]
        self._size += size[1]

    def _ends_step(self, mark: Any, counted_s: tuple[float, float]) -> bool:
        """End the step under way if it is done; return whether it was."""
        sees_none = not self._sees_optimizer and self._num_backwards >= _MANY
        if not (self._is_due or (self._had_backward and sees_none)):
            return False
        self._is_due = self._had_backward = False
        self._end_step(mark, counted_s)
        return True

    def _end_step(self, mark: Any, counted_s: tuple[float, float]) -> None:
        both = zip(self._counted_s, counted_s, strict=True)
        gc_us, compile_us = [round((now_s - before_s) * 1e6) for before_s, now_s in both]
        self._clues[self.step] = StepClues(gc_us, compile_us, self._size), self._num_samples
        self._counted_s = counted_s
        self._size = self._num_samples = 0
        self._handed_out = -1
        self.step += 1
        self._timeline.begin(self.step, at=mark)
        for step, spent_us in self._timeline.take():
            while (known := next(iter(self._clues))) < step:  # one whose clock went back
                del self._clues[known]
            self._record(StepRecord(step, 1, spent_us, *self._clues.pop(step)))
