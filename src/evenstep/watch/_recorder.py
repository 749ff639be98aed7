"""One rank's steps as they are seen from outside: a timeline, and clues beside it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, final

from torch import Size

from .._diagnosis import Phase, StepClues
from ..torch._step._meter import Timeline
from ._step_log import StepLog
from ._step_records import StepRecord

_MOST_UNSENT = 8192  # records that the thread that sends has not taken yet
_MOST_MARKS = 10_000  # of a step: one that has more is left out, as it may never end
_MANY = 64  # backwards without a step of any optimizer, or on one batch: then each may end a step
_FEW = 8  # backwards on one batch, until a hand-out has ended a step
_PHASES = {  # that begin with what is heard, which means nothing else
    "no batch": Phase.REST,
    "evaluation": Phase.EVALUATION,
    "backward": Phase.BACKWARD,
    "reduction": Phase.REDUCTION,
}


@final
class StepRecorder:
    """Finds out where the time of this rank's steps went, by what was heard on its thread.

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

    Attributes:
        step: the one under way, from 0, as far as the log was gone through.
    """

    def __init__(self, log: StepLog) -> None:
        self.step = 0
        self._heard = log.heard
        log.make_room = self.catch_up
        self._timeline = Timeline(log.clock)
        self._lock = threading.Lock()
        self._records: deque[StepRecord] = deque(maxlen=_MOST_UNSENT)
        self._counted_s = (0.0, 0.0)  # of garbage and compiling, when the step began
        self._clues: dict[int, tuple[StepClues, int]] = {}  # by step, until its times are known
        self._size = self._num_samples = 0
        self._handed_out = -1  # the mark of the hand-out before the forward; -1 is none
        self._num_backwards = 0
        self._most_on_batch = _FEW
        self._fed_until = 0  # how many backwards; before, no forward ends a step
        self._sees_optimizer = False
        self._had_backward = self._is_due = False  # whether the next hand-out begins a step

    def take_records(self) -> list[StepRecord]:
        """Return the steps that are over, and were not returned before."""
        self.catch_up()
        taken = []
        while self._records:
            taken.append(self._records.popleft())
        return taken

    def catch_up(self) -> None:
        """Go through what was heard since the last call, on whatever thread."""
        with self._lock:
            heard, timeline = self._heard, self._timeline
            while heard:
                what, mark, more = heard.popleft()
                if (phase := _PHASES.get(what)) is None:
                    self._hear(what, mark, more)
                elif phase is Phase.EVALUATION:
                    timeline.go(phase, at=mark)  # one mark, however long it is
                else:
                    timeline.cut(phase, at=mark)
                if timeline.num_marks > _MOST_MARKS:
                    timeline.drop()

    def _hear(self, what: str, mark: Any, more: Any) -> None:
        match what:
            case "input":
                self._handed_out, self._fed_until = -1, 0
                hear = self._timeline.go if more else self._timeline.cut
                hear(Phase.EVALUATION if more else Phase.INPUT, at=mark)
            case "batch":
                is_new = self._ends_step(mark, more)
                if is_new:
                    self._most_on_batch = _MANY
                self._fed_until = self._num_backwards + self._most_on_batch
                self._handed_out = 0 if is_new else self._timeline.cut(Phase.REST, at=mark)
            case "forward":
                self._begin_forward(mark, *more)
            case "backward ended":
                self._had_backward = True
                self._num_backwards += 1
                self._timeline.cut(Phase.REST, at=mark)
            case "stepped":
                self._optimizer_stepped()
                self._timeline.leave(at=mark)
            case "enters":
                self._timeline.enter(more, at=mark)
            case _:
                self._note(what, mark, more)

    def _note(self, what: str, mark: Any, more: Any) -> None:
        """Note what ends no step, now or later."""
        match what:
            case "leaves":
                self._timeline.leave(at=mark)
            case "met":
                self._timeline.met(mark, more)
            case "mixes":
                self._timeline.mixes = True
            case "begins":
                self._counted_s = more
                self._timeline.begin(0, at=mark)

    def _begin_forward(
        self, mark: Any, counted_s: tuple[float, float], size: Size | tuple[int, int]
    ) -> None:
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

    def _optimizer_stepped(self) -> None:
        self._sees_optimizer = True
        self._is_due |= self._had_backward
        self._had_backward = False

    def _ends_step(self, mark: Any, counted_s: tuple[float, float]) -> bool:
        """End the step under way if it is done; return whether it was."""
        sees_none = not self._sees_optimizer and self._num_backwards >= _MANY
        if not (self._is_due or (self._had_backward and sees_none)):
            return False
        self._is_due = self._had_backward = False
        self._end_step(mark, counted_s)
        return True

    def _end_step(self, mark: Any, counted_s: tuple[float, float]) -> None:
        gc_s, compile_s = self._counted_s
        gc_us, compile_us = (
            round((counted_s[0] - gc_s) * 1e6),
            round((counted_s[1] - compile_s) * 1e6),
        )
        self._clues[self.step] = StepClues(gc_us, compile_us, self._size), self._num_samples
        self._counted_s = counted_s
        self._size = self._num_samples = 0
        self._handed_out = -1
        self.step += 1
        self._timeline.begin(self.step, at=mark)
        for step, spent_us in self._timeline.take():
            while (known := next(iter(self._clues))) < step:  # one whose clock went back
                del self._clues[known]
            self._records.append(StepRecord(step, 1, spent_us, *self._clues.pop(step)))
