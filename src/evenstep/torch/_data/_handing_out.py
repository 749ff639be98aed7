"""One loop at a time over a loader, and every step of it announced before it is handed out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, Protocol

from ._protocols import StepListener
from ._step import Attempts, Portions, Step, StepCount


class StepLoader(Protocol):
    """A loader whose every iteration is a step.

    Attributes:
        no_sync: entered around all but the last micro-batch of a step.
        attempts: what ``Step.backward`` runs by.
    """

    no_sync: Callable[[], AbstractContextManager[Any]]
    attempts: Attempts | None


class HandingOut:
    """What loaders do alike, whatever they read from: begin and end loops, count and announce.

    A loader stands at one place, so only the newest loop over it can go on.

    Args:
        listener: whom to tell how a step goes.
        count: steps of the run so far.

    Attributes:
        newest: number of the loop that may go on, from 1; after ``cut_off``, of none.
    """

    def __init__(self, listener: StepListener, count: StepCount) -> None:
        self._listener = listener
        self._count = count
        self.newest = 0

    @contextmanager
    def loop(self, end: Callable[[], None], *, cuts: bool) -> Iterator[int]:
        """Begin a loop and give its number; end it where the ``with`` block is left.

        Args:
            end: lets go of what the loop reads from.
            cuts: whether it is a loop over ``loader.steps()``.
        """
        end()  # of a loop that was left and is still referred to
        self.newest += 1
        number = self.newest
        try:
            self._listener.begin_epoch(cuts=cuts)
            yield number
        finally:
            if self.newest == number:  # not if another loop has begun meanwhile
                end()
                self._listener.end_epoch()

    def cut_off(self) -> None:
        """Have the loop under way not go on."""
        self.newest += 1

    def check(self, number: int) -> None:
        """Raise unless the loop of this number may go on.

        Raises:
            RuntimeError: it may not.
        """
        if number != self.newest:
            raise RuntimeError(
                "the loader was closed or iterated anew, so this iteration cannot go on"
            )

    def next_step(
        self,
        loader: StepLoader,
        portions: Portions,
        global_num_samples: int,
        *,
        data_s: float,
        units: float | None,
    ) -> Step:
        """Return the next step of the run, counted and announced.

        Args:
            loader: whose step it is.
            portions: what this rank computes of it.
            global_num_samples: its samples over all ranks.
            data_s: seconds spent waiting for input.
            units: this rank's units of it; None where they are samples.
        """
        number = self._count.value
        step = Step(
            portions,
            global_num_samples,
            listener=self._listener,
            no_sync=lambda: loader.no_sync(),
            number=number,
            attempts=loader.attempts,
        )
        self._count.value += 1
        self._listener.begin_step(
            number,
            num_samples=step.num_samples,
            global_num_samples=global_num_samples,
            data_s=data_s,
            units=units,
        )
        return step


def batches_of(steps: Generator[Step, None, None]) -> Iterator[Any]:
    """Yield what every forward gets, which in a plain loop is one a step."""
    with closing(steps):
        for step in steps:
            yield from step
