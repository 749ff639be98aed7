"""Ranks that were lost, that ended their run before the others, or that went a way of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from time import monotonic
from typing import TYPE_CHECKING, final

from .._planner import in_words
from ..events import Hook, WorkerLost
from ..exceptions import RanksDivergedError, WorkerLostError
from ._message_kinds import CollectiveBroke, Goodbye, GradientsWrong, Message, RankLost
from ._router import Router
from ._threads import Framework, end_process, interrupt_thread, limit_end

if TYPE_CHECKING:
    from ._exchange import Exchange

# Shares of the grace. Until the release, threads in no collective notice the loss by themselves. A
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


class FailureWatch:
    """The loss that this process knows of, and the thread that it may keep in a collective.

    A collective with a lost peer blocks for half an hour. So collectives are broken off soon after
    a loss. A thread that still does not come out cannot be notified, and its process is ended.

    The rank that is lost since it hangs is interrupted, as by Ctrl+C, so that its script can end;
    one that cannot be interrupted is ended, too. So is a process that does not come to an end after
    its script.

    Args:
        grace_s: seconds after the loss, and in the collective, for which it may still come out.
        abort: ends the process with a message; None does so as ``end_process`` does.
        is_stuck: returns whether a thread sits in a collective, by its number.
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
        """Make the thread notice a loss: break collectives off, and at last end the process."""
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
                self._abort(str(self.error))

    def _end_hanging(self, thread_id: int) -> None:
        if not self.was_interrupted and self._passed_s() > self._grace_s:
            self.was_interrupted = True
            self._interrupt(thread_id)
        elif self._passed_s() > _AFTER_INTERRUPT * self._grace_s:
            self._abort(str(self.error))

    def _passed_s(self) -> float:
        return self._clock() - self._known_s


@final
class LostRanks(FailureWatch):
    """What this rank knows of others that are gone, and how its training thread is notified.

    Only rank 0 is notified of all that end their run; the others, of the end of rank 0.

    Args:
        router: carries messages, and asks here which workers are lost.
        hosts: host name of every rank, for errors; servers' come last.
        framework: whose collectives the training thread waits in.
        steps: knows how far this rank is, and what it waits for.
        emit: takes every event, on rank 0.
        grace_s: seconds after a loss for which the main thread may still come out of a collective.
            After that the process is ended.
        abort: ends the process with a message.
        release: breaks collectives off, so that who waits in one comes out of it; None where
            nothing can.

    Attributes:
        on_loss: called with the error at once.
        explain: what else is said of a rank whose connection closed or fell silent.
        thread_id: the training thread's.
        left: who has ended its run, as far as this rank knows.
        wrong: the error of gradients that were wrong.
        failed: who is to blame that an error ended this rank's run, and why; None if none did.
    """

    kinds = (RankLost, GradientsWrong, CollectiveBroke, Goodbye)

    def __init__(
        self,
        router: Router,
        hosts: tuple[str, ...],
        framework: Framework,
        *,
        steps: Exchange,
        emit: Hook,
        grace_s: float,
        abort: Callable[[str], None] | None,
        release: Callable[[], None] | None,
    ) -> None:
        super().__init__(
            grace_s=grace_s,
            abort=abort,
            is_stuck=framework.is_stuck,
            release=release,
            interrupt=self._interrupt_outside,
        )
        router.owner = self
        self._router = router
        self._hosts = hosts
        self._framework = framework
        self._steps = steps
        self._emit = emit
        self._left: dict[int, Goodbye] = {}
        self.left: Set[int] = self._left.keys()
        self._collective_broke = False
        self.failed: tuple[int, str] | None = None
        self.on_loss: Callable[[Exception], object] = lambda error: None
        self.explain: Callable[[], str] = lambda: ""
        self.thread_id = framework.training_thread()
        self.wrong: RuntimeError | ValueError | None = None

    @property
    def is_broken(self) -> bool:
        """Whether a worker was lost, or ranks went different ways."""
        return self.error is not None

    @property
    def interrupted_by(self) -> Exception | None:
        """The error for which the training thread was interrupted: it counted as hanging."""
        return self.error if self.was_interrupted else None

    def failure_of(self, rank: int) -> tuple[int, str] | None:
        """Return who is to blame that a rank has ended its run, and why; None if it just ended."""
        return self._left[rank].failed

    def check_left(self) -> None:
        """Take notice if a rank is needed that has ended its run."""
        if not self._left:
            return
        if self._collective_broke:
            self._blame_all()
        ahead = self._steps.newest_needed
        for rank, goodbye in tuple(self._left.items()):
            waiting = self._steps.waits_for(rank)
            if ahead > goodbye.last_step or waiting is not None:
                at = ahead if waiting is None else waiting
                self._blame(rank, goodbye, f"others are at {at}")

    def lose(self, rank: int, problem: str) -> None:
        """Have a rank count as lost, on all ranks.

        Args:
            rank: who is lost.
            problem: how that was noticed.
        """
        if self.is_broken:
            return
        if self._router.rank == 0:
            self._steps.report_all()
        ends = [goodbye.last_used for goodbye in self._left.values()]
        self.end(RankLost(rank, problem, min([self._steps.newest_done, *ends])))

    def end(self, found: RankLost | GradientsWrong) -> None:
        """End the run, on all ranks, by the first loss or wrong gradient that is found."""
        if self.is_broken:
            return
        here, lost = self._router.rank, found if isinstance(found, RankLost) else None
        if here == 0:
            # Before anything else: once the main thread knows, this process may end at any time,
            # and the others would take rank 0 for the one that was lost.
            self._router.to_everyone(found)
            if lost is not None:
                host = self._hosts[lost.rank]
                self._emit(WorkerLost(lost.done, lost.rank, host, lost.problem))
        error = self._error(found)
        self.note(error, hangs=lost is not None and lost.rank == here)
        self.wrong = error if lost is None else None
        try:
            self.on_loss(error)
        finally:
            self._router.notify()
            logging.getLogger("evenstep").critical("%s", error)

    def received(self, peer: int, message: Message) -> None:
        """Take in a loss or a goodbye."""
        match message:
            case RankLost(rank, problem) if self._router.rank == 0:
                self.lose(rank, problem)
            case RankLost() | GradientsWrong():
                self.end(message)
            case CollectiveBroke():
                self._break_collective()
            case Goodbye():
                with self._router.changed:
                    self._left[peer] = message
                    self._router.changed.notify_all()

    def verdict(self, *, within_s: float, in_collective: bool = False) -> Exception | None:
        """Return the loss of a worker, if one becomes known in time.

        For a rank whose collective broke: one that ended its run is to blame for that, too.
        None at once if no collective was under way.

        Args:
            within_s: how long to wait for the news.
            in_collective: whether the error says that it comes from a collective.
        """
        if not (in_collective or self.in_collective):
            return self.wrong
        self._steps.report_all()
        self._router.to_leader(CollectiveBroke())  # rank 0 learns of all ends
        with self._router.changed:
            self._router.changed.wait_for(lambda: self.is_broken or self._left, timeout=within_s)
        self._break_collective()
        return self.error

    def enter_collective(self) -> bool:
        """Note that the calling thread goes into a collective; return if it was in none."""
        self.thread_id = self._framework.training_thread()
        return super().enter_collective()

    def act(self, *, asked_to_end: bool) -> None:
        """End the process if a worker was lost and the training thread cannot come by to say so.

        Args:
            asked_to_end: whether this process was asked to end as well.
        """
        if self.is_broken and asked_to_end:
            # No rank is left to agree with, and the one that said so waits, as torchrun does
            # before it starts the workers anew.
            self._abort(f"{self.error} This process was asked to end as well.")
        self.end_if_stuck(self.thread_id)

    def script_failed(self, error: BaseException) -> None:
        """Have the goodbye say so: others would take it for the end of training."""
        rank, step = self._router.rank, self._steps.last_used
        if isinstance(error, SystemExit) and not error.code:
            self.failed = None
        elif isinstance(error, WorkerLostError) and error.rank != rank:
            self.failed = error.rank, f"rank {rank} lost it, and ended its run"
        else:
            when = f"after step {step}" if step >= 0 else "before the end of a step"
            self.failed = rank, f"it raised {in_words(error)} {when}"

    def _break_collective(self) -> None:
        """Blame who has ended its run, or will: a collective broke on some rank, and needs all."""
        self._collective_broke = True
        self._blame_all()

    def _blame_all(self) -> None:
        for rank, goodbye in tuple(self._left.items()):
            self._blame(rank, goodbye, "others had not")

    def _blame(self, rank: int, goodbye: Goodbye, others: str) -> None:
        ended = f"it ended its run after step {goodbye.last_used}, {others}"
        self.lose(*(goodbye.failed or (rank, ended)))

    def _interrupt_outside(self, thread_id: int) -> None:
        """Interrupt the thread, unless it waits in a collective, which was broken off."""
        if not self._framework.place_of(thread_id).in_collective:
            interrupt_thread(thread_id)

    def _error(self, found: RankLost | GradientsWrong) -> RuntimeError | ValueError:
        match found:
            case RankLost(rank, problem, done):
                restart = self._framework.restart
                return lost_worker(rank, self._hosts[rank], problem, done=done, restart=restart)
            case GradientsWrong(text, rank):
                return ValueError(text) if rank is None else RanksDivergedError(rank, text)
