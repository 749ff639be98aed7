"""One loop at a time over a loader, and every step of it announced before it is handed out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, final

from .._protocols import LoaderSession, StepStart
from .._step import Attempts, Portions, Step, StepCount


@final
class HandingOut:
    """What loaders do alike, whatever they read from: begin and end loops, count and announce.

    A loader stands at one place, that of the newest loop. A loop before it may take it over again,
    as after ``next(iter(loader))`` for a look at a batch.

    Args:
        session: is told of every loop and step.
        count: steps of the run so far.

    Attributes:
        current: number of the loop that the loader stands at, from 1.
    """

    def __init__(self, session: LoaderSession, count: StepCount) -> None:
        self._session = session
        self._count = count
        self.current = 0
        self._num_begun = 0
        self._cut_off = 0  # loops up to this one cannot go on
        self._open: set[int] = set()

    @property
    def is_nested(self) -> bool:
        """Whether a loop was begun and is not over."""
        return bool(self._open)

    @contextmanager
    def loop(self, end: Callable[[], None], *, cuts: bool) -> Iterator[int]:
        """Begin a loop and give its number; end it where the ``with`` block is left.

        Args:
            end: lets go of what the loop reads from.
            cuts: whether it is a loop over ``loader.steps()``.
        """
        end()  # of a loop that was left and is still referred to
        self._num_begun += 1
        self.current = number = self._num_begun
        self._open.add(number)
        try:
            self._session.begin_epoch(cuts=cuts)
            yield number
            self._session.steps.came_to_end()
        finally:
            self._open.discard(number)
            if self.current == number:  # not if another loop has begun meanwhile
                end()
                if not self._open:
                    self._session.steps.end_epoch()

    def cut_off(self) -> None:
        """Have the loops under way not go on."""
        self._cut_off = self._num_begun
        self._open.clear()

    def takes_over(self, number: int) -> bool:
        """Have the loop of this number go on; return whether another one has begun meanwhile.

        Raises:
            RuntimeError: the loader was closed.
        """
        if number <= self._cut_off:
            raise RuntimeError("the loader was closed, so this iteration cannot go on")
        before, self.current = self.current, number
        return before != number

    def check(self, number: int) -> None:
        """Raise unless the loop of this number may go on, where none can be taken over.

        Raises:
            RuntimeError: it may not.
        """
        if number <= self._cut_off or number != self.current:
            raise RuntimeError(
                "the loader was closed or iterated anew, so this iteration cannot go on: what was "
                "read of a stream is gone. Make another loader for a look at its samples."
            )

    def next_step(
        self,
        portions: Portions,
        global_num_samples: int,
        *,
        data_s: float,
        units: float | None,
        no_sync: Callable[[], AbstractContextManager[Any]],
        attempts: Attempts | None,
    ) -> Step:
        """Return the next step of the run, counted and announced.

        Args:
            portions: what this rank computes of it.
            global_num_samples: its samples over all ranks.
            data_s: seconds spent waiting for input.
            units: this rank's units of it; None where they are samples.
            no_sync: entered around all but its last micro-batch.
            attempts: runs ``Step.backward``; None without a model.
        """
        number = self._count.value
        step = Step(
            portions,
            global_num_samples,
            session=self._session,
            no_sync=no_sync,
            number=number,
            attempts=attempts,
        )
        self._count.value += 1
        self._session.steps.begin_step(
            StepStart(number, step.num_samples, global_num_samples, data_s, units)
        )
        return step


def batches_of(steps: Generator[Step, None, None]) -> Iterator[Any]:
    """Yield what every forward gets, which in a plain loop is one a step."""
    with closing(steps):
        for step in steps:
            yield from step
