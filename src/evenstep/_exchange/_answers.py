"""What rank 0 has decided after each step, which steps all ranks have done, and when all stop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .._planner import Plan
from ._message_kinds import Answer, DoneReply, DoneRequest, Message, PlanReply, StopRequest
from ._router import Extension, Router

MOST_KEPT = 128
"""Answers, and the lag: claims come where a step is used, and loops may fetch ahead."""

# The books of a step are kept this much later, in the middle of the next one: at once, they
# would take Python's lock from the main thread on its way through the optimizer.
_BOOKS_S = 0.005


class Answers:
    """The plans that are known here, by the step after which each was decided.

    Rank 0 sends them to all: each answer with the plans that are new, in one message, which takes
    half the time of two on each of a thousand connections. A plan that no answer follows at once
    is sent by itself, and before any later answer.

    A rank that wants to stop asks rank 0, whose next answer says so to all.

    Read without the lock: an answer is there before ``newest`` says so, and dropped long after.

    Args:
        router: carries messages.
        lag: steps by which a plan trails its measurement.

    Attributes:
        plans: the answers, by step.
        newest: the newest step that was answered; -1 is the plan before all steps, -2 none.
        due: the step whose report this rank sends, with those of the steps before.
        newest_done: the newest step that all ranks have reported, as far as this rank knows.
            That a step is answered says nothing of it: plans are known, or asked for, ahead.
        listeners: called with every new plan, on whichever thread learns of it.
        extensions: notified before each answer, on rank 0.
        end_asked: whether this process was asked to end.
        stop_asked: whether a rank known here wants to stop.
        stops_after: the answer from which on all ranks know; None as long as there is none.
    """

    kinds = (PlanReply, Answer, StopRequest, DoneRequest, DoneReply)

    def __init__(self, router: Router, *, lag: int) -> None:
        self._router = router
        self._lock = threading.Lock()
        self._unsent: list[PlanReply] = []  # on rank 0
        self._asking: dict[int, int] = {}  # on rank 0: who waits until which step is done
        self._plan: Plan | None = None
        self._lag = lag
        self.plans: dict[int, Plan] = {}
        self.newest = -2
        self.newest_done = -1
        self.due = 0
        self.listeners: list[Callable[[Plan], None]] = []
        self.extensions: list[Extension] = []
        self.end_asked = self.stop_asked = False
        self.stops_after: int | None = None

    def announce(self, plan: Plan) -> None:
        """Send a plan to all ranks, if it is new. None may be left out: ranks replay them all."""
        if self._plan is not None and self._plan.epoch == plan.epoch:
            return
        with self._lock:
            self._unsent.append(PlanReply(plan))
        self._router.later(self._send, delay_s=0.0)
        self._take(plan)

    def publish(self, index: int, *, due: int, done: int) -> None:
        """Let the newest plan be the answer to step ``index``, and to all until one is due.

        Args:
            index: the first step that is answered.
            due: the step after whose reports the next plan is decided. It may be past, where ranks
                ask ahead.
            done: the newest step that all ranks have reported.
        """
        answer = Answer(index, due, done, self.stop_asked)
        self._keep(answer)  # claims need it before others know
        for extension in self.extensions:
            extension.answers(through(answer))
        self._send(answer)
        self._publish(answer)

    def completed(self, step: int) -> None:
        """Take in that all ranks have reported ``step``."""
        self.newest_done = max(self.newest_done, step)
        if not self._asking:  # who waits has asked
            return
        with self._router.changed:
            self._router.changed.notify_all()
            known = [rank for rank, asked in self._asking.items() if asked <= self.newest_done]
            for rank in known:
                del self._asking[rank]
        for rank in known:
            self._router.to(rank, DoneReply(self.newest_done))

    def later(self, call: Callable[[], None]) -> None:
        """Make ``call`` when no rank waits for anything."""
        self._router.later(call, delay_s=_BOOKS_S)

    def forget_before(self, index: int) -> None:
        """Drop answers that this rank has long passed, where it is at ``index``."""
        with self._router.changed:
            for old in [key for key in self.plans if key < index][: -MOST_KEPT - self._lag]:
                del self.plans[old]

    def received(self, peer: int, message: Message) -> None:
        """Take in a plan, an answer, or which steps are done; or, on rank 0, who asks for that."""
        match message:
            case PlanReply(plan):
                self._take(plan)
            case StopRequest():
                self.stop_asked = True
            case Answer():
                self.newest_done = max(self.newest_done, message.done)
                self._keep(message)
                self._publish(message)
            case DoneRequest(step):
                with self._router.changed:
                    self._asking[peer] = step
                self.completed(self.newest_done)
            case DoneReply(step):
                with self._router.changed:
                    self.newest_done = max(self.newest_done, step)
                    self._router.changed.notify_all()

    def _take(self, plan: Plan) -> None:
        self._plan = plan
        for listener in tuple(self.listeners):
            listener(plan)

    def _send(self, *answer: Answer) -> None:
        with self._lock:
            plans, self._unsent = self._unsent, []
            if plans or answer:
                self._router.to_everyone(*plans, *answer)

    def _keep(self, answer: Answer) -> None:
        assert self._plan is not None
        if answer.stops and self.stops_after is None:
            self.stops_after = answer.index
        with self._router.changed:
            self.plans |= dict.fromkeys(range(answer.index, through(answer) + 1), self._plan)

    def _publish(self, answer: Answer) -> None:
        self.due = answer.due  # before any thread can come to that step
        with self._router.changed:
            self.newest = through(answer)
            self._router.changed.notify_all()


def through(answer: Answer) -> int:
    """Return the newest step that is answered: the plan of the one after ``due`` is not known."""
    return max(answer.index, answer.due - 1)
