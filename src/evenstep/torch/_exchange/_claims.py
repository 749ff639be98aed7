"""Claims on what is left of a step: every rank asks rank 0, which keeps the books."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ...control import Plan
from ...sync import Claim, Hybrid, StepClaims
from ._channel import StarChannel
from ._unit_sums import Owner

_KEPT_STEPS = 4  # ranks are at most a step apart: nobody claims from an older one


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
        self.scheme: Hybrid | None = None  # set on rank 0 before the first claim
        self.awaited: int | None = None  # the step whose claim is under way

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
            return self._grant(self._rank, step, speed, own=own)
        self._answer, self.awaited = None, step
        self._channel.send(0, {"claim": step, "speed": speed, "own": own})
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
            case {"claim": step, "speed": speed, "own": own}:
                granted = self._grant(peer, step, speed, own=own)
                rows = [(claim.owner, claim.start, claim.stop) for claim in granted]
                assert self._channel is not None
                self._channel.send(peer, {"granted": rows})
            case {"granted": rows}:
                with self._changed:
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

    def _open(self, step: int) -> StepClaims:
        plan = self._plan_of(step)
        assert self.scheme is not None
        assert plan.tile is not None
        for old in [known for known in self._steps if known <= step - _KEPT_STEPS]:
            del self._steps[old]
        return StepClaims.begin(self.scheme, np.array(plan.batch_size, np.int64), tile=plan.tile)
