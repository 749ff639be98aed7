"""The loss of a rank: what is said of it, and whether the training thread can hear it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import final

from ..exceptions import WorkerLostError
from ._process import end_process, interrupt_thread, limit_end

# Shares of the grace. Until the release, those in no collective hear of the loss by themselves. A
# script that was interrupted may have something to put away.
_UNTIL_RELEASE = 1 / 3
_AFTER_INTERRUPT = 10


def lost_worker(rank: int, host: str, problem: str, *, done: int, restart: str) -> WorkerLostError:
    """Return the error of a lost worker.

    Args:
        rank: who was lost.
        host: its host name.
        problem: how that was noticed, and what to do if it was a mistake.
        done: the last step complete on all ranks.
        restart: what starts a run anew.
    """
    newest = f"The last step complete on all ranks is {done}."
    if done < 0:
        newest = "No step was complete on all ranks."
    return WorkerLostError(
        rank,
        f"Rank {rank} on {host} was lost: {problem}. {newest} "
        f"Restart the run from its last checkpoint ({restart}).",
    )


@final
class LossWatch:
    """The loss that this process knows of, and the thread that it may keep in a collective.

    A collective with a lost peer blocks for half an hour. So collectives are broken off soon after
    a loss. A thread that still does not come out cannot be told of it, and its process is ended.

    The rank that is lost since it hangs is interrupted, as by Ctrl+C, so that its script can end;
    one that cannot be interrupted is ended, too. So is a process that does not come to an end after
    its script.

    Args:
        grace_s: seconds after the loss, and in the collective, for which it may still come out.
        abort: ends the process with a message; None does so as ``end_process`` does.
        is_stuck: tells whether a thread sits in a collective, by its number.
        release: breaks collectives off, wherever the thread may be; None where nothing can.
        interrupt: interrupts a thread, by its number.
        clock: seconds that only grow.

    Attributes:
        error: the loss, or that ranks went different ways; None while there is neither.
        was_interrupted: whether the thread was.
        collective_s: since when the thread is in a collective, by ``clock``; None while it is in
            none. A step sets it without a call.
    """

    def __init__(
        self,
        *,
        grace_s: float,
        abort: Callable[[str], None] | None,
        is_stuck: Callable[[int], bool],
        release: Callable[[], None] | None = None,
        interrupt: Callable[[int], None] = interrupt_thread,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.error: RuntimeError | ValueError | None = None
        self.was_interrupted = False
        self._grace_s = grace_s
        self._abort = abort or end_process
        self._is_stuck = is_stuck
        self._release = release
        self._interrupt = interrupt
        self._hangs = False
        self._clock = clock
        self._known_s = 0.0
        self.collective_s: float | None = None

    @property
    def in_collective(self) -> bool:
        """Whether the thread is noted to be in a collective."""
        return self.collective_s is not None

    def note(self, error: RuntimeError | ValueError, *, hangs: bool = False) -> None:
        """Have the loss known: the first one, which its caller has to see to.

        Args:
            error: what is known.
            hangs: whether it is this process that counts as hanging.
        """
        self._known_s = self._clock()
        self._hangs = hangs
        self.error = error  # last: another thread looks at both
        if self._abort is end_process:
            limit_end(_AFTER_INTERRUPT * self._grace_s)

    def check(self) -> None:
        """Raise if there was a loss.

        Raises:
            WorkerLostError: a rank was lost.
            RanksDivergedError, ValueError: gradients were wrong, on all ranks.
        """
        if self.error is not None:
            raise self.error

    def enter_collective(self) -> bool:
        """Note that the thread goes into a collective; return if it was in none."""
        was_outside = self.collective_s is None
        self.collective_s = self._clock()
        return was_outside

    def leave_collective(self) -> None:
        """Note that it is back."""
        self.collective_s = None

    def end_if_stuck(self, thread_id: int) -> None:
        """Have the thread hear of a loss: break collectives off, and at last end the process."""
        if self.error is None:
            return
        if self._release is not None and self._passed_s() > _UNTIL_RELEASE * self._grace_s:
            release, self._release = self._release, None
            release()
            self._known_s = self._clock()  # the thread has all of the grace to come out of it
        if self._hangs:
            self._end_hanging(thread_id)
        elif (since_s := self.collective_s) is not None:  # the thread may leave meanwhile
            late = min(self._passed_s(), self._clock() - since_s) > self._grace_s
            if late and self._is_stuck(thread_id):
                self.end(str(self.error))

    def _end_hanging(self, thread_id: int) -> None:
        if not self.was_interrupted and self._passed_s() > self._grace_s:
            self.was_interrupted = True
            self._interrupt(thread_id)
        elif self._passed_s() > _AFTER_INTERRUPT * self._grace_s:
            self.end(str(self.error))

    def _passed_s(self) -> float:
        return self._clock() - self._known_s

    def end(self, problem: str) -> None:
        """End the process, which says so."""
        self._abort(problem)
