"""One worker's steps in a ``fit`` of Keras: marks in, a record of each step out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import final

from .._diagnosis import Phase, StepClues, time_by_phase
from ._step_records import StepRecord

_MOST_UNSENT = 8192  # records that the thread that sends has not taken yet


@final
class KerasSteps:
    """Marks where the time of a worker's steps goes, by what is called in and around the graph.

    A step lasts from the begin of a call of the model's ``train_function`` to the next one's. In
    it the worker fetches its own batch, asks whether all have one (a meeting), computes up to its
    complete gradients, and sums them with the others. What follows in the graph, the optimizer
    and the sums of metrics, counts as reduction: how long it takes by itself is not known.

    Args:
        gc_s: seconds of garbage collection so far.
        now: a monotonic clock in seconds.

    Attributes:
        step: the one under way, from 0.
        compile_s: seconds of tracing so far, to be counted on by the caller.
    """

    def __init__(
        self, *, gc_s: Callable[[], float], now: Callable[[], float] = perf_counter
    ) -> None:
        self.step = 0
        self._records: deque[StepRecord] = deque(maxlen=_MOST_UNSENT)
        self.compile_s = 0.0
        self._gc_s, self._now = gc_s, now
        self._gc_before, self._compile_before = gc_s(), 0.0
        self._cuts: list[tuple[float, Phase]] = []  # of the step under way
        self._is_inside = False  # of a call of ``train_function``
        self._num_samples = self._size = 0
        self._blocks: list[Phase] = []  # that are open, such as an evaluation

    def take_records(self) -> list[StepRecord]:
        """Return the steps that are over, and were not returned before."""
        taken = []
        while self._records:
            taken.append(self._records.popleft())
        return taken

    def begin(self) -> None:
        """End the step before, if any, and begin one: its batch is about to be fetched."""
        if self._cuts:
            self._end_step()
        self._cuts = []
        self._blocks.clear()
        self._is_inside = True
        self._cut(Phase.INPUT)

    def fetched(self) -> None:
        """Note that the own batch is there, and the others are to be asked for theirs."""
        if self._is_inside:
            self._cut(Phase.MEETING)

    def batch_there(self, num_samples: int, size: int) -> None:
        """Note that all have one.

        Raises:
            ValueError: it is the second one of the step.
        """
        if not self._is_inside:
            return
        if any(phase is Phase.FORWARD for _, phase in self._cuts):
            raise ValueError("several steps in one call: leave out `steps_per_execution`")
        self._num_samples, self._size = num_samples, size
        self._cut(Phase.FORWARD)

    def gradients_done(self) -> None:
        """Note that the own gradients are complete."""
        if self._is_inside:
            self._cut(Phase.REDUCTION)

    def end(self, *, is_whole: bool) -> None:
        """Note that the call is over.

        Args:
            is_whole: whether it was a step; else the data had an end.

        Raises:
            ValueError: no gradient was seen in a step.
        """
        self._is_inside = False
        if is_whole and all(phase is not Phase.REDUCTION for _, phase in self._cuts):
            raise ValueError(
                "no gradient came to the compiled optimizer's `apply` or `apply_gradients`"
            )
        self._cut(Phase.REST)

    def enter(self, phase: Phase) -> None:
        """Note that something else begins, such as an evaluation; the outermost one counts."""
        if not self._is_inside and self._cuts:
            if not self._blocks:
                self._cut(phase)
            self._blocks.append(phase)

    def leave(self) -> None:
        """Note that it is over."""
        if self._blocks:
            self._blocks.pop()
            if not self._blocks:
                self._cut(Phase.REST)

    def _cut(self, phase: Phase) -> None:
        self._cuts.append((self._now(), phase))

    def _end_step(self) -> None:
        self._cut(Phase.REST)
        lasted_s = [end - begin for (begin, _), (end, _) in pairwise(self._cuts)]
        phases = [phase for _, phase in self._cuts[:-1]]
        gc_s = self._gc_s()
        clues = StepClues(
            gc_us=round((gc_s - self._gc_before) * 1e6),
            compile_us=round((self.compile_s - self._compile_before) * 1e6),
            size=self._size,
        )
        self._gc_before, self._compile_before = gc_s, self.compile_s
        spent_us = time_by_phase(lasted_s, phases)
        if Phase.REDUCTION in phases:
            self._records.append(StepRecord(self.step, 1, spent_us, clues, self._num_samples))
            self.step += 1
