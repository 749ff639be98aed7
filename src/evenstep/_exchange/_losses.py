"""The loss of a rank: what is said of it, and whether the training thread can hear it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import final

from ..exceptions import RanksDivergedError, WorkerLostError
from ._process import end_process

_RELEASE = 1 / 3  # of the grace: those in no collective hear of the loss by themselves meanwhile


def lost_worker(rank: int, host: str, problem: str, *, done: int, restart: str) -> WorkerLostError:
    """Return the error of a lost worker.

    Args:
        rank: who was lost.
        host: its host name.
        problem: how that was noticed, and what to do if it was a mistake.
        done: the last step complete on all ranks.
        restart: what starts a run anew.
    """
    newest = f"The last step complete on all ranks is {done}." if done >= 0 else ""
    return WorkerLostError(
        rank,
        f"Rank {rank} on {host} was lost: {problem}. {newest or 'No step was complete on all.'} "
        f"Restart the run from its last checkpoint ({restart}).",
    )


@final
class LossWatch:
    """The loss that this process knows of, and the thread that it may keep in a collective.

    A collective with a lost peer blocks for half an hour. So collectives are broken off soon after
    a loss. A thread that still does not come out can be told of it by nobody, and its process is
    ended.

    Args:
        grace_s: seconds after the loss, and in the collective, for which it may still come out.
        abort: ends the process with a message; None does so as ``end_process`` does.
        is_stuck: tells whether a thread sits in a collective, by its number.
        release: breaks collectives off, wherever the thread may be; None where nothing can.
        clock: seconds that only grow.

    Attributes:
        error: the loss, or that ranks went different ways; None while there is neither.
    """

    def __init__(
        self,
        *,
        grace_s: float,
        abort: Callable[[str], None] | None,
        is_stuck: Callable[[int], bool],
        release: Callable[[], None] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.error: WorkerLostError | RanksDivergedError | None = None
        self._grace_s = grace_s
        self._abort = abort or end_process
        self._is_stuck = is_stuck
        self._release = release
        self._clock = clock
        self._known_s = 0.0
        self._collective_s: float | None = None  # since when the thread is in one

    @property
    def in_collective(self) -> bool:
        """Whether the thread is noted to be in a collective."""
        return self._collective_s is not None

    def note(self, error: WorkerLostError | RanksDivergedError) -> None:
        """Have the loss known: the first one, which its caller has to see to."""
        self._known_s = self._clock()
        self.error = error  # last: another thread looks at both

    def check(self) -> None:
        """Raise if there was a loss.

        Raises:
            WorkerLostError: a rank was lost.
            RanksDivergedError: ranks reduced the gradients of different batches together.
        """
        if self.error is not None:
            raise self.error

    def enter_collective(self) -> bool:
        """Note that the thread goes into a collective; return if it was in none."""
        was_outside = self._collective_s is None
        self._collective_s = self._clock()
        return was_outside

    def leave_collective(self) -> None:
        """Note that it is back."""
        self._collective_s = None

    def end_if_stuck(self, thread_id: int) -> None:
        """Have the thread hear of a loss: break collectives off, and at last end the process."""
        if self.error is None:
            return
        if self._release is not None and self._clock() - self._known_s > _RELEASE * self._grace_s:
            release, self._release = self._release, None
            release()
            self._known_s = self._clock()  # the thread has all of the grace to come out of it
        if (since_s := self._collective_s) is None:
            return
        late = self._clock() - max(self._known_s, since_s) > self._grace_s
        if late and self._is_stuck(thread_id):
            self.end(str(self.error))

    def end(self, problem: str) -> None:
        """End the process, which says so."""
        self._abort(problem)
