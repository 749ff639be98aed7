"""The plans that rank 0 has answered with, how it tells them, and the wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .._planner import Plan
from ._channel import StarChannel
from ._wire import Message

_MOST_KEPT = 8  # for ranks behind, which claim by them; and the lag


class Answers:
    """What was decided after each step, as far as this rank has heard.

    Read without the lock: an answer is there before ``newest`` says so, and dropped long after.

    Args:
        changed: notified when an answer comes, and by the owner when a worker is lost.
        lag: steps by which a plan trails its measurement.
        is_over: whether no answer will come any more, as a worker was lost.

    Attributes:
        newest: the newest step that was answered; -1 is the plan before all steps, -2 none.
    """

    def __init__(
        self, changed: threading.Condition, *, lag: int, is_over: Callable[[], bool]
    ) -> None:
        self._changed = changed
        self._lag = lag
        self._is_over = is_over
        self._plans: dict[int, Plan] = {}  # by the step after which each was decided
        self.newest = -2

    def put(self, index: int, through: int, plan: Plan) -> None:
        """Keep the answer to some steps: claims need it before it is published."""
        with self._changed:
            self._plans |= dict.fromkeys(range(index, through + 1), plan)

    def publish(self, index: int) -> None:
        """Have it known."""
        with self._changed:
            self.newest = index
            self._changed.notify_all()

    def plan(self, index: int) -> Plan:
        """Return the answer to step ``index``, which was published."""
        if len(self._plans) > _MOST_KEPT + self._lag:
            with self._changed:
                for old in [key for key in self._plans if key < index][: -1 - self._lag]:
                    del self._plans[old]
        return self._plans[index]

    def wait(self, index: int, *, limit_s: float | None) -> bool:
        """Wait for the answer to step ``index``, or until none will come; tell whether it is here.

        Args:
            index: the step.
            limit_s: for how long; None is as long as it takes.
        """
        if self.newest < index:
            with self._changed:
                self._changed.wait_for(
                    lambda: self.newest >= index or self._is_over(), timeout=limit_s
                )
        return self.newest >= index


class Announcements:
    """On rank 0: tells all ranks the answers, each with the plans that are new, in one message.

    On each of a thousand connections, one message takes half the time of two. A plan that no
    answer follows at once is told by itself, and before any later answer.

    Args:
        channel: connections to the others.
    """

    def __init__(self, channel: StarChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._plans: list[Message] = []

    def plan(self, plan: Plan) -> None:
        """Tell a plan, along with the answer that follows, if one does."""
        with self._lock:
            self._plans.append({name: getattr(plan, name) for name in Plan.__slots__})
        self._channel.call_later(self._tell, delay_s=0.0)

    def answer(self, answer: Message) -> None:
        """Tell an answer to a step: from now on, the newest plan told is in force."""
        self._tell(answer)

    def _tell(self, answer: Message | None = None) -> None:
        with self._lock:
            plans, self._plans = self._plans, []
            if plans or answer:
                self._channel.send_all(({"plans": plans} if plans else {}) | (answer or {}))
