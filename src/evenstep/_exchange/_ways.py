"""One rank's side of the comparison: what it reduced goes to rank 0, which finds who differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from ._message_kinds import (
    HoldNothing,
    Message,
    RanksDiverged,
    Reduced,
    ReductionKey,
    StepsAsked,
    StepsTold,
)
from ._reductions import Reductions
from ._router import Router


class Ways:
    """Sends what this rank's reductions were made of, before it waits for the others in them.

    Args:
        router: carries messages.
        differ: called on rank 0, from any thread, when ranks went different ways.
    """

    kinds = (Reduced, StepsAsked, StepsTold)

    def __init__(self, router: Router, *, differ: Callable[[RanksDiverged], None]) -> None:
        self._router = router
        self._differ = differ
        self._books = Reductions(router.world_size)  # on rank 0
        self._asking: defaultdict[ReductionKey, set[int]] = defaultdict(set)  # on rank 0
        self._answers: dict[ReductionKey, Sequence[int]] = {}
        self._awaited: set[ReductionKey] = set()
        self._has_asked = False  # on rank 0, for the reports that others hold

    def tell(self, reduced: Sequence[Reduced]) -> None:
        """Tell rank 0 of reductions outside of a report."""
        if reduced:
            self._router.to_leader(*reduced)

    def steps_of(self, key: ReductionKey) -> Sequence[int]:
        """Return the steps that a reduction may be of, as far as other ranks know; else none.

        For a rank that cannot tell which batch it has, in the backward of that reduction: others
        tell of it before they wait for this one.

        Raises:
            WorkerLostError: a worker was lost before it told.
            RanksDivergedError, ValueError: gradients were wrong, on all ranks.
        """
        self._awaited.add(key)
        try:
            self._router.to_leader(StepsAsked(key))
            self._router.need(lambda: key in self._answers)
            return self._answers.pop(key)
        finally:
            self._awaited.discard(key)

    def misses(self, rank: int) -> bool:
        """Return whether a thread here waits for ``rank``."""
        return bool(self._awaited) and (self._router.rank == 0 or rank == 0)

    def received(self, peer: int, message: Message) -> None:
        """Take in what a rank reduced, a question, or an answer."""
        match message:
            case Reduced(model, number):
                found = self._books.take(peer, message)
                if found is not None:
                    self._differ(found)
                if self._asking:
                    self._answer((model, number))
            case StepsAsked(key):
                self._ask(peer, key)
            case StepsTold(key, steps):
                with self._router.changed:
                    self._answers[key] = steps
                    self._router.changed.notify_all()

    def _ask(self, rank: int, key: ReductionKey) -> None:
        """On rank 0: answer now, or when others tell, which from now on do so at once."""
        with self._router.changed:
            self._asking[key].add(rank)
        if not self._has_asked:
            self._has_asked = True
            self._router.to_workers(HoldNothing())
            self._router.to_leader(HoldNothing())
        self._answer(key)

    def _answer(self, key: ReductionKey) -> None:
        num_told, steps = self._books.steps(key)
        with self._router.changed:
            is_all = num_told + len(self._asking.get(key, ())) == self._router.world_size
            asking = self._asking.pop(key, set()) if is_all or len(steps) == 1 else set()
        for rank in asking:
            self._router.to(rank, StepsTold(key, tuple(steps)))
