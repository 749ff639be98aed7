"""Reports to rank 0, plans back: every rank applies the same integers in the same step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import final

import numpy as np

from .._planner import AbstractPlanner, Plan
from ..claims import Hybrid
from ..claims._step_claims import Claim, StepClaims
from ..events import Hook
from ._answers import MOST_KEPT, Answers
from ._channel import Data, StarChannel
from ._decisions import Decisions
from ._divergence import DivergenceCheck
from ._loss_checks import LossScales, NotFinite
from ._lost_ranks import LostRanks
from ._mailbox import Mailbox, UnitSums
from ._message_kinds import (
    ClaimReply,
    ClaimRequest,
    DoneRequest,
    Goodbye,
    HoldNothing,
    Message,
    PlanRequest,
    StopRequest,
)
from ._progress import STEPS, UNITS, ProgressReporter
from ._router import Extension, Router
from ._threads import Framework

_KEPT_STEPS = 4  # ranks are at most a step apart: no rank claims from an older one


class Claims:
    """One rank's side of the claims: a small message to rank 0 and one back for each.

    Rank 0 answers on the channel's thread, and its own claims itself. Why not a counter in the
    process group's store: the size of a claim depends on what is left, and which samples it gets
    on whose they were. Both are integers that one rank decides.

    Args:
        router: carries messages.
        plan_of: on rank 0, gives the plan of a step that some rank is in.

    Attributes:
        scheme: how claims go; set on rank 0 before the first.
        newest: on rank 0, the newest step that a rank has claimed of; -1 before.
        claiming: on rank 0, who may still claim of that one.
    """

    kinds = (ClaimRequest, ClaimReply)

    def __init__(self, router: Router, *, plan_of: Callable[[int], Plan]) -> None:
        self._router = router
        self._plan_of = plan_of
        self._lock = threading.Lock()
        self._steps: dict[int, StepClaims] = {}  # on rank 0
        self._num_asked = 0
        self.scheme: Hybrid | None = None
        self.newest = -1
        self.claiming: frozenset[int] = frozenset()

    def claim(
        self, step: int, *, speed: float | None = None, own: bool = False
    ) -> tuple[Claim, ...]:
        """Return what this rank computes next in ``step``; nothing if it is done.

        Args:
            step: the one under way, whose plan has its samples up for claims.
            speed: samples per second of its newest samples in this step, if there were any.
            own: whether to get all that is left of its own part.

        Raises:
            WorkerLostError: a worker was lost before the answer came.
        """
        self._num_asked += 1
        self._router.to_leader(ClaimRequest(self._num_asked, step, speed, own))
        claims: tuple[Claim, ...] = self._router.get(("claims", self._num_asked))
        return claims

    def received(self, peer: int, message: Message) -> None:
        """Take in a claim, or what was granted."""
        match message:
            case ClaimRequest(number, step, speed, own):
                with self._lock:
                    if step not in self._steps:
                        self._steps[step] = self._open(step)
                    left = self._steps[step]
                    granted = left.claim_own(peer) if own else left.claim(peer, speed)
                self._router.to(peer, ClaimReply(number, granted))
                if step == self.newest and (own or not granted):  # it will not ask again
                    with self._router.changed:
                        self.claiming -= {peer}
                        self._router.changed.notify_all()
            case ClaimReply(number, claims):
                self._router.put(("claims", number), claims)

    def _open(self, step: int) -> StepClaims:
        plan = self._plan_of(step)
        assert self.scheme is not None
        assert plan.tile is not None
        for old in [known for known in self._steps if known <= step - _KEPT_STEPS]:
            del self._steps[old]
        sizes = np.array(plan.batch_size, np.int64)
        with self._router.changed:
            if step > self.newest:
                self.newest, self.claiming = step, frozenset(np.flatnonzero(sizes).tolist())
        return StepClaims(self.scheme, sizes, tile=plan.tile)


_LOGGER = logging.getLogger("evenstep")
_BEFORE_ALL = -1  # the plan of a run's first steps is no answer to a step's reports
_LAST_CLAIMS_S = 30.0  # at the close, for a rank that left its last step in the middle
_LAST_REPORTS_S = 10.0  # at the close, for what others hold: they send it with their next heartbeat


@final
class ReportQueue:
    """Reports of steps that are on their way to rank 0.

    The thread that trains only notes what makes a report. At a step that is due it wakes the
    channel's thread, which makes, encodes and sends what was noted, and on rank 0 plans by it. A
    heartbeat sends what was noted, too, and so does the end of the run. With one process the thread
    that trains makes each report as it comes, so that no step has to make many.

    Where a rank does not know its batch before it learns of the others', each report leaves at
    once from then on: that rank may be the one for which all wait.

    Reports leave in the order in which they came, whichever threads send them.

    Args:
        router: carries messages.
    """

    kinds = (HoldNothing,)

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = threading.RLock()  # of who sends
        self._kept: deque[Callable[[], Sequence[Message]]] = deque()
        self._wake = router.waker(self.flush)
        self._holds = router.world_size > 1
        self._is_sending = False

    @property
    def num_held(self) -> int:
        """How many reports were noted and are not sent."""
        return len(self._kept) + self._is_sending

    def add(self, made: Callable[[], Sequence[Message]], *, is_due: bool) -> None:
        """Note a report, and have it sent with those before it if it is due.

        Args:
            made: returns its messages, on any thread.
            is_due: whether a plan waits for it.
        """
        self._kept.append(made)
        if is_due or not self._holds:
            self._wake()

    def flush(self, *, waits: bool = True) -> None:
        """Make and send what was noted.

        Args:
            waits: whether to wait for another thread that is at it.
        """
        if not self._lock.acquire(blocking=waits):
            return
        try:
            self._is_sending = True
            messages: list[Message] = []
            while self._kept:
                messages += self._kept.popleft()()
            if messages:
                self._router.to_leader(*messages)
        finally:
            self._is_sending = False
            self._lock.release()

    def received(self, peer: int, message: Message) -> None:
        """Hold nothing any more."""
        self._holds = False
        self.flush()


class Exchange:
    """One rank's side of the exchange: its parts, and the plan point of a step.

    Every rank reports every step, with whatever measurements are complete. Each plan says at which
    step the next one is due. A rank sends its reports of all steps up to that one when it has come
    to it, and waits for a plan after it alone. When all have arrived, rank 0 decides and answers.
    Steps of 17 ms and more are all due; of shorter ones, one in about 50 ms. Nothing changes in
    between: a stop holds from a step on whose plan no rank can have asked for.

    The plan of step ``s`` is the answer to step ``s - 1 - lag``: with lag 0 (CPU) step k decides
    k + 1; with lag 1 (CUDA) no rank waits for a device, and step k usually decides k + 2.

    Reports, messages and decisions run on the channel's thread, while the all-reduce and the
    optimizer of the same step keep the caller busy, so that the plan point finds the answer there.
    With one process there is no such thread, and the caller decides.

    Args:
        rank: this process.
        hosts: host name of every rank, for errors; servers' come last.
        channel: connections to the others; None with one process.
        framework: whose collectives the training thread waits in.
        lag: steps by which a plan trails its measurement, 0 or 1.
        num_servers: how many of them only sum gradients, and report no steps.
        emit: takes every event, on rank 0.
        heartbeat_s: seconds between two calls of ``tick``.
        hang_s: seconds for which a rank may keep others waiting in a step; None is any time.
        grace_s: seconds after a loss for which the main thread may still come out of a collective.
            After that the process is ended.
        abort: ends the process with a message.
        release: breaks collectives off, so that who waits in one comes out of it; None where
            nothing can.

    Attributes:
        lost_ranks: who is gone, and what collectives the training thread may wait in.
        decisions: on rank 0.
        units, claims, mailbox, divergence, not_finite, scales: what else ranks send each other.
        last_step, last_used: the newest step that this rank has reported, and of these the newest
            that had a backward; -1 before.
        last_reduced: the newest step whose gradients were summed over all ranks, as far as it is
            noted here.
        num_loops: over the loaders of this process, as servers will want to know.
        stopping: whether all ranks stop, as of the newest plan point, so the same on all ranks.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        channel: StarChannel | None,
        *,
        framework: Framework,
        lag: int = 0,
        num_servers: int = 0,
        emit: Hook,
        heartbeat_s: float = 1.0,
        hang_s: float | None = None,
        grace_s: float = 3.0,
        abort: Callable[[str], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        world_size = len(hosts) - num_servers
        self._channel = channel
        self._lag = lag
        self._framework = framework
        self._router = router = Router(rank, world_size, channel)
        self.lost_ranks = LostRanks(
            router,
            tuple(hosts),
            framework,
            steps=self,
            emit=emit,
            grace_s=grace_s,
            abort=abort,
            release=release,
        )
        self._progress = ProgressReporter(
            router,
            hosts[:world_size],
            framework,
            lost_ranks=self.lost_ranks,
            hang_s=hang_s,
            heartbeat_s=heartbeat_s,
        )
        self._answers = Answers(router, lag=lag)
        self.decisions = Decisions(world_size, lag=lag, answers=self._answers, emit=emit)
        self._reports = ReportQueue(router)
        self.units = UnitSums(router, came_to=partial(self._progress.counts.__setitem__, UNITS))
        self.claims = Claims(router, plan_of=self._plan_of)
        self.mailbox = Mailbox(router)
        self.divergence = DivergenceCheck(router, differ=self.lost_ranks.end)
        self.not_finite = NotFinite(router, emit=emit)
        self.scales = LossScales(router, refuse=self.lost_ranks.end, warn=_LOGGER.warning)
        router.add(self.lost_ranks, self._progress, self._answers, self.decisions)
        router.add(self._reports, self.units, self.claims, self.mailbox, self.divergence)
        router.add(self.not_finite, self.scales)
        self._first_step: int | None = None
        self.last_step = self.last_used = self.last_reduced = self._newest_needed = -1
        self._awaited = {True: -2, False: -2}  # answer that a thread which trains needs, or another
        self.num_loops = 0
        self.stopping = False

    def start(self) -> None:
        """Start listening. Before this, nothing is sent or received."""
        if self._channel is not None:
            self._channel.start(self)

    def add(self, extension: Extension) -> None:
        """Have ``extension`` take part in every step from the first on.

        As it has plans and reports of its own, every step is due.
        """
        self._router.add(extension)
        self._answers.extensions.append(extension)
        self.decisions.holds = False

    def send_to_workers(self, message: Message) -> None:
        """On rank 0: send an extension's message to all other workers, ahead of the next answer."""
        self._router.to_workers(message)

    def lead(self, planner: AbstractPlanner) -> None:
        """On rank 0: plan with ``planner`` and send its first plan to all ranks."""
        self.decisions.planner = planner
        self.claims.scheme = None if planner.claims is None else planner.claims.scheme
        self._answers.announce(planner.plan)
        self._answers.publish(-1, due=0, done=-1)

    def ask_to_stop(self) -> None:
        """Have all ranks stop after the same step. May be called from a signal handler."""
        self._answers.end_asked = self._answers.stop_asked = True

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Have ``listener`` called with every new plan, from whichever thread learns of it."""
        self._answers.listeners.append(listener)

    def report(
        self,
        step: int,
        made: Callable[[], Sequence[Message]],
        *,
        is_used: bool = True,
    ) -> None:
        """Note this rank's report of ``step``, and have it sent if the step is due.

        Args:
            step: the step under way.
            made: returns the messages of the report, on any thread; ``StepReports`` is the last.
            is_used: whether it had a backward.
        """
        self.last_step = max(step, self.last_step)
        if is_used:
            self.last_used = self.last_step
        first: list[Message] = [StopRequest()] if self._answers.stop_asked else []
        for extension in self._answers.extensions:
            first += extension.along()
        is_due = step >= self._answers.due
        self._reports.add((lambda: (*first, *made())) if first else made, is_due=is_due)
        if self.lost_ranks.left:
            self.lost_ranks.check_left()
        self._progress.counts[STEPS] = self.last_step

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages to rank 0 that no plan waits for, with the reports of this rank."""
        if messages:
            self._reports.add(lambda: messages, is_due=False)

    def at(self, step: int, *, trains: bool = True, may_look_ahead: bool = False) -> Plan:
        """Return the plan of ``step``, once it is decided: the plan point.

        Args:
            step: whose plan.
            trains: whether the training thread asks, and not one that fetches for it.
            may_look_ahead: whether this rank may ask for it before it has reported the steps that
                decide it. Then the newest plan is the answer, for all ranks.

        Raises:
            WorkerLostError: a worker that is needed for it was lost.
            RanksDivergedError, ValueError: gradients were wrong, on all ranks.
        """
        lost_ranks = self.lost_ranks
        if trains:
            lost_ranks.collective_s = None
            lost_ranks.thread_id = self._framework.training_thread()
        if self._first_step is None:  # of this process: a resumed run counts on
            self._first_step = step
            self._progress.counts |= {STEPS: step - 1, UNITS: step - 1}
        answers, index = self._answers, step - 1 - self._lag
        if index < self._first_step:
            index = _BEFORE_ALL
        if lost_ranks.wrong is not None:
            raise lost_ranks.wrong
        if may_look_ahead and index > max(self.last_step, answers.newest):
            self._router.to_leader(PlanRequest(index))
        self._awaited[trains] = index
        if answers.newest < index:
            self._router.need(lambda: answers.newest >= index)
        self.stopping = answers.stops_after is not None and answers.stops_after <= index
        if len(answers.plans) > 3 * MOST_KEPT:
            answers.forget_before(index)
        return answers.plans[index]

    def need_all(self, step: int) -> None:
        """Note that this rank needs all others for a step, perhaps before it reports it.

        Raises:
            WorkerLostError: one of them has ended its run before that step.
        """
        self._newest_needed = step
        self.lost_ranks.check_left()
        self.lost_ranks.check()

    def wait_for_reports(self, step: int, *, limit_s: float) -> None:
        """Wait until all ranks have reported a step, or never will.

        Rank 0 has compared by then what all ranks made of it.

        Args:
            step: which. One that this rank was handed and did not use may be used by another, in
                whose gradient this one then had a part.
            limit_s: for how long at most.
        """
        self.report_all()
        self._router.to_leader(DoneRequest(step))
        self._router.wait(partial(self._is_reported, step), limit_s=limit_s)

    def report_all(self) -> None:
        """Send the reports that were noted."""
        self._reports.flush()

    def pause(self) -> AbstractContextManager[None]:
        """Return a context in which this rank works alone, and does not count as hanging."""
        return self._progress.pause()

    def close(self) -> None:
        """Say goodbye and stop. May be called again.

        Where no rank waits for a device, or for gradients that are only accumulated, others may
        still claim what is left of the last step: rank 0 answers until they are through. It stays
        for the last reports of all, too, unless an error ended its run.
        """
        self.lost_ranks.leave_collective()
        for extension in self._answers.extensions:
            extension.close()
        if self._channel is not None:
            self.report_all()
            self._router.wait(self._are_through, limit_s=_LAST_CLAIMS_S)
            failed = self.lost_ranks.failed
            if self._router.rank == 0 and failed is None:
                self.wait_for_reports(self.last_used, limit_s=_LAST_REPORTS_S)
            said = Goodbye(self.last_step, self.last_used, self.num_loops, failed)
            self._router.to_everyone(said)
            self._router.close()
            self._channel = None
        self.decisions.end()
        self.not_finite.end(self.last_step)

    def received(self, peer: int, message: Data) -> None:
        """Take in what came from another rank."""
        self._router.received(peer, message)

    def lost(self, peer: int, problem: str) -> None:
        """Take notice of a broken or silent connection."""
        if peer not in self.lost_ranks.left:
            self.lost_ranks.lose(peer, problem + self.lost_ranks.explain())

    def tick(self) -> None:
        """Look who keeps the others waiting; act on a loss."""
        self._reports.flush(waits=False)
        if not self.lost_ranks.is_broken and (hung := self._progress.look()) is not None:
            self.lost_ranks.lose(*hung)
        self.lost_ranks.act(asked_to_end=self._answers.end_asked)

    @property
    def newest_needed(self) -> int:
        """The newest step for which this rank needs all others."""
        newest = self.last_step
        if self._router.rank == 0 and not self._reports.num_held:
            newest = self.decisions.newest
        return max(newest, self._newest_needed)

    @property
    def newest_done(self) -> int:
        """The newest step that all ranks have done, as far as this rank can know.

        Reports may be held until a step is due. The gradients of a step show the same at once.
        """
        return max(self._answers.newest_done, self.last_reduced)

    def waits_for(self, rank: int) -> int | None:
        """Return the step that waits for what only ``rank`` could send; None if none does."""
        waiting = self.units.waits_for(rank)
        if (
            waiting is None
            and self._router.rank == 0
            and self.lost_ranks.failure_of(rank) is not None
        ):
            waiting = self.decisions.waits_for(rank)  # an error in a report leaves it unsent
        if waiting is None and (self._router.misses(rank) or self._misses_an_answer(rank)):
            waiting = self.last_step + 1
        return waiting

    def _misses_an_answer(self, rank: int) -> bool:
        """Return whether a plan point waits for an answer that rank 0, which has left, never gives.

        A thread that fetches ahead may do so at the end of a run that went well.
        """
        if rank != 0:
            return False
        failed = self.lost_ranks.failure_of(0) is not None
        awaited = [index for trains, index in self._awaited.items() if trains or failed]
        return any(index > self._answers.newest for index in awaited)

    def _plan_of(self, step: int) -> Plan:
        """Return the plan of a step which some rank has begun: it was published."""
        index = step - 1 - self._lag
        is_first = self._first_step is None or index < self._first_step
        return self._answers.plans[_BEFORE_ALL if is_first else index]

    def _is_reported(self, step: int) -> bool:
        """Return whether all have reported a step, or those that could say so have left."""
        left, is_leader = self.lost_ranks.left, self._router.rank == 0
        is_over = len(left) == self._router.world_size - 1 if is_leader else 0 in left
        return is_over or self._answers.newest_done >= step

    def _are_through(self) -> bool:
        """Return whether no rank will claim more of a step that this rank has done its part of."""
        step, claiming = self.claims.newest, self.claims.claiming - self.lost_ranks.left
        if self._router.rank in claiming or self.last_step < step:
            return True
        return not claiming or self._answers.newest >= step
