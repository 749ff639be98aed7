"""Claims on what is left of a step: every rank asks rank 0, which keeps the books."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .._planner import Plan
from ..claims import Hybrid
from ..claims._step_claims import Claim, StepClaims
from ._channel import StarChannel
from ._unit_sums import Owner

_KEPT_STEPS = 4  # ranks are at most a step apart: no rank claims from an older one


class Claims:
    """One rank's side of the claims: a small message to rank 0 and one back for each.

    Rank 0 answers on the channel's thread, and its own claims itself. Why not a counter in the
    process group's store: the size of a claim depends on what is left, and which samples it gets
    on whose they were. Both are integers that one rank decides.

    Args:
        rank: this process.
        channel: connections to the others; None with one process.
        changed: notified when an answer comes, and when a worker was lost.
        owner: told when an answer is waited for.
        plan_of: on rank 0, gives the plan of a step that some rank is in.

    Attributes:
        scheme: how claims go; set on rank 0 before the first.
        awaited: the step whose claim is under way.
        newest: on rank 0, the newest step that a rank has claimed of; -1 before.
        claiming: on rank 0, who may still claim of that one.
    """

    def __init__(
        self,
        rank: int,
        channel: StarChannel | None,
        changed: threading.Condition,
        *,
        owner: Owner,
        plan_of: Callable[[int], Plan],
    ) -> None:
        self._rank = rank
        self._channel = channel
        self._changed = changed
        self._owner = owner
        self._plan_of = plan_of
        self._lock = threading.Lock()
        self._steps: dict[int, StepClaims] = {}  # on rank 0
        self._answer: tuple[Claim, ...] | None = None
        self._num_asked = 0  # an answer names its claim: one that was broken off may come later
        self.scheme: Hybrid | None = None
        self.awaited: int | None = None
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
        if self._rank == 0 or self._channel is None:
            granted = self._grant(self._rank, step, speed, own=own)
            self._note(self._rank, step, is_done=own or not granted)
            return granted
        with self._changed:
            self._answer, self.awaited = None, step
            self._num_asked += 1
        message = {"claim": step, "speed": speed, "own": own, "number": self._num_asked}
        self._channel.send(0, message)
        self._owner.check_left()
        try:
            with self._changed:
                while self._answer is None:
                    self._owner.check()
                    self._changed.wait()
                return self._answer
        finally:
            self.awaited = None

    def received(self, peer: int, message: dict[str, Any]) -> bool:
        """Take in a message if it is about claims; return whether it was."""
        match message:
            case {"claim": step, "speed": speed, "own": own, "number": number}:
                granted = self._grant(peer, step, speed, own=own)
                rows = [(claim.owner, claim.start, claim.stop) for claim in granted]
                assert self._channel is not None
                self._channel.send(peer, {"granted": rows, "number": number})
                self._note(peer, step, is_done=own or not rows)  # nothing is owed to it any more
            case {"granted": rows, "number": number}:
                with self._changed:
                    if number == self._num_asked:
                        self._answer = tuple(Claim(*row) for row in rows)
                        self._changed.notify_all()
            case _:
                return False
        return True

    def _grant(self, rank: int, step: int, speed: float | None, *, own: bool) -> tuple[Claim, ...]:
        with self._lock:
            claims = self._steps.get(step) or self._open(step)
            answer = claims.claim_own(rank) if own else claims.claim(rank, speed)
            granted, self._steps[step] = answer
            return granted

    def _note(self, rank: int, step: int, *, is_done: bool) -> None:
        """Take note of who was answered, and whether it will ask again."""
        with self._changed:
            if is_done and step == self.newest:
                self.claiming -= {rank}
                self._changed.notify_all()

    def _open(self, step: int) -> StepClaims:
        plan = self._plan_of(step)
        assert self.scheme is not None
        assert plan.tile is not None
        for old in [known for known in self._steps if known <= step - _KEPT_STEPS]:
            del self._steps[old]
        sizes = np.array(plan.batch_size, np.int64)
        with self._changed:
            if step > self.newest:
                self.newest, self.claiming = step, frozenset(np.flatnonzero(sizes).tolist())
        return StepClaims.begin(self.scheme, sizes, tile=plan.tile)
