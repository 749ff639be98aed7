"""Reports to rank 0, plans back: every rank applies the same integers in the same step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from .._planner import Plan, Planner, Report
from ..events import Hook, WorkerLost
from ..exceptions import RanksDivergedError, WorkerLostError
from ._answers import Announcements, Answers
from ._channel import Message, StarChannel
from ._claims import Claims
from ._completed import Completed
from ._decisions import Decisions, read_plan
from ._departures import Departures, failure_of
from ._held_reports import HeldReports
from ._internal import fault_in_words, log_fault
from ._losses import LossWatch, lost_worker
from ._mailbox import Mailbox
from ._not_finite import NotFinite
from ._place import Framework
from ._process import interrupt_thread
from ._progress import STEPS, UNITS, Patrol
from ._reductions import Differing, Reduced
from ._riders import Riders
from ._stop import Stop
from ._unit_sums import UnitSums
from ._ways import Ways
from ._wire import Part

# The books of a step are kept this much later, in the middle of the next one: at once, they
# would take Python's lock from the main thread on its way through the optimizer.
_BOOKS_S = 0.005

_LAST_CLAIMS_S = 30.0  # at the close, for a rank that left its last step in the middle


class Exchange:
    """One rank's side of the exchange.

    Every rank reports every step, with whatever measurements are complete. When all have arrived,
    rank 0 decides and answers with the plan, of several steps where it is known to stay. The plan
    of step ``s`` is the one decided after the reports of step ``s - 1 - lag``: with lag 0 (CPU)
    step k decides k + 1; with lag 1 (CUDA) no rank waits for a device, and step k usually decides
    k + 2.

    Messages and decisions run on the channel's thread, or on the caller's where its own report is
    the last one; both while the all-reduce and the optimizer of the same step keep the caller
    busy, so that the plan point finds the answer there.

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
        self._rank = rank
        self._hosts = tuple(hosts)
        world_size = len(hosts) - num_servers
        self._channel = channel
        self._lag = lag
        self._emit = emit
        self._framework = framework
        self._loss = LossWatch(
            grace_s=grace_s,
            abort=abort,
            is_stuck=framework.is_stuck,
            release=release,
            interrupt=self._interrupt,
        )
        self._plan: Plan | None = None
        self._announcements = Announcements(channel) if rank == 0 and channel is not None else None
        self._changed = threading.Condition()  # an answer came, or a worker was lost
        self._answers = Answers(self._changed, lag=lag, is_over=lambda: self.is_broken)
        self.mailbox = Mailbox(rank, world_size, channel, self._changed, owner=self)
        self.claims = Claims(rank, channel, self._changed, owner=self, plan_of=self._plan_of)
        self.not_finite = NotFinite(rank, channel, emit=emit)
        self.decisions = Decisions(world_size, lag=lag, announcer=self, emit=emit)  # on rank 0
        self.ways = Ways(rank, world_size, channel, self._changed, owner=self, differ=self._diverge)
        self._reports = HeldReports(channel)
        self._left = Departures(self._changed, lose=self._fail)
        is_over: Callable[[], bool] = lambda: self.is_broken or 0 in self._left  # noqa: E731
        self._completed = Completed(rank, channel, self._changed, is_over=is_over)
        self._listeners: list[Callable[[Plan], None]] = []
        self.on_loss: Callable[[RuntimeError], object] = lambda error: None  # told of it at once
        self._first_step: int | None = None
        self._last_step = self._newest_reported = self._needed = -1
        self._patrol = Patrol(
            rank, hosts[:world_size], channel, framework, hang_s=hang_s, heartbeat_s=heartbeat_s
        )
        came_to = partial(self._patrol.came_to, UNITS)
        self.units = UnitSums(rank, world_size, channel, self._changed, owner=self, came_to=came_to)
        self.stop = Stop()
        self.riders = Riders(channel)
        parts = self.units, self.mailbox, self.claims, self.riders, self.not_finite
        others = self.stop, self.ways, self._patrol, self._completed, self._reports
        self._parts: tuple[Part, ...] = (*parts, *others)
        self.num_loops = 0  # over the loaders of this process, as servers will want to know
        self._failed: tuple[int, str] | None = None  # who was lost by this process' own end
        self.stopping = False  # as of the newest plan point, so the same on all ranks

    def start(self) -> None:
        """Start listening. Before this, nothing is sent or received."""
        if self._channel is not None:
            self._channel.start(self)

    def lead(self, planner: Planner) -> None:
        """On rank 0: plan with ``planner`` and tell all ranks its first plan."""
        self.decisions.planner = planner
        self.claims.scheme = None if planner.claims is None else planner.claims.scheme
        self.announce(planner.plan)
        self.publish(-1, -1)

    @property
    def is_broken(self) -> bool:
        """Whether a worker was lost."""
        return self._loss.error is not None

    @property
    def interrupted_by(self) -> RuntimeError | None:
        """The error for which the training thread was interrupted: it counted as hanging."""
        return self._loss.error if self._loss.was_interrupted else None

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Have ``listener`` called with every new plan, from whichever thread learns of it."""
        self._listeners.append(listener)

    def report(
        self,
        step: int,
        reports: Sequence[Report],
        *,
        reduced: Sequence[Reduced] = (),
    ) -> None:
        """Send this rank's report of ``step``, or hold it while no plan waits for it.

        Args:
            step: the step under way.
            reports: the measurements that are complete.
            reduced: what its gradients were made of.
        """
        self._last_step = self._newest_reported = max(step, self._last_step)
        if self._rank != 0 and self._channel is not None:
            message: Message = {"step": step, "reports": reports}
            message |= self.ways.along(reduced)
            message |= self.riders.along()
            message |= {"stop": True} if self.stop.asked else {}
            urgent = self.stop.asked or any(report.again or report.fault for report in reports)
            self._reports.add(step, message, urgent=urgent)
        else:
            self.riders.received(0, self.riders.along())
            self.ways.tell(reduced)
            self.decisions.take(0, step, reports)
        self.check_left()
        self._patrol.came_to(STEPS, self._last_step)

    def at(self, step: int, *, trains: bool = True, may_look_ahead: bool = False) -> Plan:
        """Return the plan of ``step``, once it is decided: the plan point.

        Args:
            step: whose plan.
            trains: whether the training thread asks, and not one that fetches for it.
            may_look_ahead: whether this rank may ask for it before it has reported the steps that
                decide it. Then the newest plan is the answer, for all ranks.

        Raises:
            WorkerLostError: a worker that is needed for it was lost.
            RanksDivergedError: ranks reduced the gradients of different batches together.
        """
        if trains:
            self._loss.leave_collective()
            self._patrol.thread_id = self._framework.training_thread()
        if self._first_step is None:  # of this process: a resumed run counts on
            self._first_step = step
            self._patrol.came_to(STEPS, step - 1)
            self._patrol.came_to(UNITS, step - 1)
        index = self._index_of(step)
        self.check_way()
        if may_look_ahead and index > max(self._newest_reported, self._answers.newest):
            self._ask_for(index)
        if not self._answers.wait(index, limit_s=None):
            self.check()
        self.stopping = self.stop.is_known(index)
        return self._answers.plan(index)

    @property
    def diverged(self) -> RanksDivergedError | None:
        """The error of ranks that reduced the gradients of different batches together."""
        error = self._loss.error
        return error if isinstance(error, RanksDivergedError) else None

    def check_way(self) -> None:
        """Raise if ranks went different ways, which no plan can mend.

        Raises:
            RanksDivergedError: they did.
        """
        if self._loss.error is not None and self.diverged is not None:
            raise self.diverged

    def _ask_for(self, index: int) -> None:
        if self._rank == 0 or self._channel is None:
            self.decisions.answer(index)
        else:
            self._channel.send(0, {"ask": index})

    def need_all(self, step: int) -> None:
        """Note that this rank needs all others for a step, perhaps before it reports it.

        Raises:
            WorkerLostError: one of them has ended its run before that step.
        """
        self._needed = step
        self.check_left()
        self.check()

    def _index_of(self, step: int) -> int:
        """Return the step after which the plan of ``step`` is decided; -1 is before all."""
        index = step - 1 - self._lag
        return -1 if self._first_step is None or index < self._first_step else index

    def _plan_of(self, step: int) -> Plan:
        """Return the plan of a step which some rank has begun: it was published."""
        return self._answers.plan(self._index_of(step))

    def hear_out(self, *, limit_s: float) -> None:
        """Wait until all ranks have reported this rank's last step, at most ``limit_s``.

        Rank 0 has compared by then what all ranks made of it.
        """
        self._reports.flush()
        self._completed.wait(self._last_step, limit_s=limit_s)

    def check(self) -> None:
        """Raise if a worker was lost.

        Raises:
            WorkerLostError: a worker was lost.
        """
        self._loss.check()

    def verdict(self, *, within_s: float, in_collective: bool = False) -> RuntimeError | None:
        """Return the loss of a worker, if one becomes known in time.

        For a rank whose collective broke: one that ended its run is to blame for that, too.
        None at once if no collective was under way.

        Args:
            within_s: how long to wait for the news.
            in_collective: whether the error says that it comes from a collective.
        """
        if not (in_collective or self._loss.in_collective):
            return self.diverged
        if self._channel is not None:  # a connection that broke is given time to be made again
            within_s += self._channel.reconnect_s
            self._reports.flush()
            if self._rank != 0:  # which alone hears of the end of others
                self._channel.send(0, {"broke": self._last_step})
        with self._changed:
            self._changed.wait_for(lambda: self.is_broken or self._left, timeout=within_s)
        self._left.collective_broke()
        return self._loss.error

    def enter_collective(self) -> bool:
        """Note that the calling thread goes into a collective; return if it was in none."""
        self._patrol.thread_id = self._framework.training_thread()
        return self._loss.enter_collective()

    def leave_collective(self) -> None:
        """Note that it is back."""
        self._loss.leave_collective()

    def pause(self) -> AbstractContextManager[None]:
        """Return a context in which this rank works alone, and does not count as hanging."""
        return self._patrol.pause()

    def script_failed(self, error: BaseException) -> None:
        """Have the goodbye say so: others would take it for the end of training."""
        self._failed = failure_of(error, self._rank, self._last_step)

    def close(self) -> None:
        """Say goodbye and stop. May be called again.

        Where no rank waits for a device, or for gradients that are only accumulated, others may
        still claim what is left of the last step: rank 0 answers until they are through.
        """
        self._loss.leave_collective()
        self.riders.close()
        if self._channel is not None:
            self._reports.flush()
            with self._changed:
                self._changed.wait_for(self._are_through, timeout=_LAST_CLAIMS_S)
            failed = {} if self._failed is None else {"failed": self._failed}
            self._channel.send_all({"bye": self._last_step, "loops": self.num_loops, **failed})
            self._channel.close()
            self._channel = self._announcements = None
        self.not_finite.end(self._last_step)

    def _are_through(self) -> bool:
        """Tell whether no rank will claim more of a step that this rank has done its part of."""
        step, claiming = self.claims.newest, self.claims.claiming - self._left.ranks()
        if self._rank in claiming or self._last_step < step or self.is_broken:
            return True
        return not claiming or self._answers.newest >= step

    def received(self, peer: int, message: Message) -> None:
        """Take in a report (rank 0) or a plan (the others), units, a loss or a goodbye."""
        self._guarded(partial(self._take_in, peer, message))

    def _guarded(self, call: Callable[[], None]) -> None:
        """Do what others rely on: should it fail, which is a fault of ours, this rank is lost."""
        try:
            call()
        except Exception as error:
            log_fault(None, error, "This rank cannot go on.")
            if self._rank != 0 and self._channel is not None:
                self._channel.send(0, {"lost": self._rank, "problem": fault_in_words(error)})
            self._fail(self._rank, fault_in_words(error))

    def _take_in(self, peer: int, message: Message) -> None:
        match message:
            case {"step": step, "reports": rows}:
                self.stop.asked |= message.get("stop", False)
                self.riders.received(peer, message)
                self.ways.received(peer, message)
                self.decisions.take(peer, step, [Report(*row) for row in rows])
                self.check_left()
            case {"plans": plans, **rest}:
                for plan in plans:
                    self.announce(read_plan(plan))
                if rest:
                    self.received(peer, rest)
            case {"after": index, "through": through}:
                self.stop.hear(index, message)
                self.publish(index, through)
            case {"ask": index}:
                self.decisions.answer(index)
            case _:
                self._received_news(peer, message)

    def _received_news(self, peer: int, message: Message) -> None:
        """Take in what does not come with every step."""
        match message:
            case {"lost": rank, "problem": problem}:
                self._fail(rank, problem)
            case {"diverged": rank, "text": text}:
                self._diverge(Differing(rank, text))
            case {"several": reports}:
                for report in reports:
                    self._take_in(peer, report)
            case {"broke": _}:
                self._left.collective_broke()
            case {"bye": _}:
                self._patrol.left(peer)
                self._left.hear(peer, message)
                self.check_left()
            case _ if not any(part.received(peer, message) for part in self._parts):
                self._fail(peer, f"it sent {sorted(message)}, which rank {self._rank} cannot read")

    def lost(self, peer: int, problem: str) -> None:
        """Take notice of a broken or silent connection."""
        if peer not in self._left:
            self._fail(peer, problem)

    def tick(self) -> None:
        """Look who keeps the others waiting; act on a loss.

        End the process if a worker was lost and the main thread cannot come by to say so.
        """
        self._reports.flush()
        if not self.is_broken and (hung := self._patrol.look()) is not None:
            self._fail(*hung)
        if self.is_broken and self.stop.told:
            # No rank is left to agree with, and the one that said so waits, as torchrun does
            # before it starts the workers anew.
            self._loss.end(f"{self._loss.error} This process was told to end as well.")
        self._loss.end_if_stuck(self._patrol.thread_id)

    def _diverge(self, differing: Differing) -> None:
        """Have all ranks hear that they went different ways."""
        if self.is_broken:
            return
        if self._rank == 0 and self._channel is not None:
            self._channel.send_all({"diverged": differing.rank, "text": differing.text})
        self._end_by(RanksDivergedError(differing.rank, differing.text))

    def announce(self, plan: Plan) -> None:
        """Tell all ranks a plan, if it is new. None may be left out: ranks replay them all."""
        if self._plan is not None and self._plan.epoch == plan.epoch:
            return
        if self._announcements is not None:
            self._announcements.plan(plan)
        self._plan = plan
        for listener in tuple(self._listeners):
            listener(plan)

    def publish(self, index: int, through: int) -> None:
        """Let the newest plan be the answer to the steps from ``index`` to ``through``."""
        assert self._plan is not None
        self._answers.put(index, through, self._plan)
        if self._rank == 0:
            stop = self.stop.answer(index)
            self.riders.answers(through)
        if self._announcements is not None:
            self._announcements.answer({"after": index, "through": through, **stop})
        self._answers.publish(through)
        if through > index:
            self._reports.known_until = through

    def completed(self, step: int) -> None:
        """Take in that all ranks have reported ``step``."""
        self._completed.put(step)

    def later(self, call: Callable[[], None]) -> None:
        """Make ``call`` when no rank waits for anything."""
        if self._channel is None:
            call()
        else:
            self._channel.call_later(partial(self._guarded, call), delay_s=_BOOKS_S)

    def check_left(self) -> None:
        """Take notice if a rank is needed that has ended its run."""
        if not self._left:
            return
        ahead = self.decisions.newest if self._rank == 0 else self._last_step
        self._left.look(max(ahead, self._needed), self._step_without)

    def _step_without(self, rank: int) -> int | None:
        """Return the step that waits for what only ``rank`` could send; None if none does."""
        waiting = self.units.step_without(rank)
        if waiting is None and rank == 0:
            waiting = self.claims.awaited
        if waiting is None and (self.mailbox.misses(rank) or self.ways.misses(rank)):
            waiting = self._last_step + 1
        return waiting

    def _newest_done(self) -> int:
        """Return the newest step that all ranks have done, as far as this rank can know."""
        answered, reported = self._answers.newest, self._last_step
        if answered <= self._reports.known_until:  # ahead: others may still be in this one
            reported -= 1
        return max(min(answered, reported), self._completed.newest)

    def _fail(self, rank: int, problem: str) -> None:
        if self.is_broken:
            return
        host, done = self._hosts[rank], self._newest_done()
        restart = self._framework.restart
        error = lost_worker(rank, host, problem, done=done, restart=restart)
        if self._rank == 0 and self._channel is not None:
            # Before anything else: once the main thread knows, this process may end at any time,
            # and the others would take rank 0 for the one that was lost.
            self._channel.send_all({"lost": rank, "problem": problem})
            self._emit(WorkerLost(done, rank, host, problem))
        self._end_by(error, hangs=rank == self._rank)

    def _interrupt(self, thread_id: int) -> None:
        """Interrupt the thread, unless it waits in a collective, which was broken off."""
        if not self._framework.place_of(thread_id).in_collective:
            interrupt_thread(thread_id)

    def _end_by(self, error: WorkerLostError | RanksDivergedError, *, hangs: bool = False) -> None:
        self._loss.note(error, hangs=hangs)
        try:
            self.on_loss(error)
        finally:
            with self._changed:
                self._changed.notify_all()
            logging.getLogger("evenstep").critical("%s", error)
