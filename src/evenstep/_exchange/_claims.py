"""Claims on what is left of a step: every rank asks rank 0, which keeps the books."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from .._planner import Plan
from ..claims import Hybrid
from ..claims._step_claims import Claim, StepClaims
from ._message_kinds import ClaimReply, ClaimRequest, Message
from ._router import Router

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
        awaited: the step whose claim is under way.
        newest: on rank 0, the newest step that a rank has claimed of; -1 before.
        claiming: on rank 0, who may still claim of that one.
    """

    kinds = (ClaimRequest, ClaimReply)

    def __init__(self, router: Router, *, plan_of: Callable[[int], Plan]) -> None:
        self._router = router
        self._plan_of = plan_of
        self._lock = threading.Lock()
        self._steps: dict[int, StepClaims] = {}  # on rank 0
        self._answer: tuple[Claim, ...] | None = None
        self._num_asked = 0
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
        with self._router.changed:
            self._answer, self.awaited = None, step
            self._num_asked += 1
        try:
            self._router.to_leader(ClaimRequest(self._num_asked, step, speed, own))
            self._router.need(lambda: self._answer is not None)
        finally:
            self.awaited = None
        assert self._answer is not None
        return self._answer

    def received(self, peer: int, message: Message) -> None:
        """Take in a claim, or what was granted."""
        match message:
            case ClaimRequest(number, step, speed, own):
                granted = self._grant(peer, step, speed, own=own)
                self._router.to(peer, ClaimReply(number, granted))
                if own or not granted:
                    self._is_done(peer, step)  # nothing is owed to it any more
            case ClaimReply(number, claims):
                with self._router.changed:
                    if number == self._num_asked:
                        self._answer = claims
                        self._router.changed.notify_all()

    def _grant(self, rank: int, step: int, speed: float | None, *, own: bool) -> tuple[Claim, ...]:
        with self._lock:
            claims = self._steps.get(step) or self._open(step)
            answer = claims.claim_own(rank) if own else claims.claim(rank, speed)
            granted, self._steps[step] = answer
            return granted

    def _is_done(self, rank: int, step: int) -> None:
        """Take note that a rank will not ask again in this step."""
        with self._router.changed:
            if step == self.newest:
                self.claiming -= {rank}
                self._router.changed.notify_all()

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
        return StepClaims.begin(self.scheme, sizes, tile=plan.tile)
