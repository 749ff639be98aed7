"""Whether all ranks reduced gradients of the same batches: each reports, and rank 0 compares."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from ._message_kinds import (
    GradientsWrong,
    HoldNothing,
    Message,
    Reduced,
    ReductionKey,
    StepsReply,
    StepsRequest,
)
from ._router import Router
from ._world_check import listed

_SAME = 1e-6  # shares of a batch are ratios of whole numbers, summed up


def _differ(reported: Iterable[Reduced]) -> bool:
    """Return whether ranks cannot have put the same into a reduction."""
    first, *others = reported
    if all(one == first for one in others):
        return False
    if len({one.checksum for one in reported if one.checksum}) > 1:
        return True
    return any(not _may_be(one, other) for one in reported for other in reported)


def _may_be(one: Reduced, other: Reduced) -> bool:
    """Return whether ``other`` may be made of the same steps as ``one``, with the same shares."""
    if not other.shares.keys() <= one.shares.keys() | set(one.maybe):
        return False
    pairs = [(share, one.shares.get(step)) for step, share in other.shares.items()]
    return all(
        mine is None or theirs is None or abs(mine - theirs) <= _SAME for theirs, mine in pairs
    )


def _differing(reported: Mapping[int, Reduced], key: ReductionKey) -> GradientsWrong:
    if all(_may_be(one, other) for one in reported.values() for other in reported.values()):
        return _assigned_apart(reported)
    kinds = {rank: _words(one) for rank, one in sorted(reported.items())}
    rank, most, others = _odd_one(kinds)
    return GradientsWrong(
        f"Rank {rank} reduced gradients of {kinds[rank]} together with those of {most} on "
        f"{listed(others)} (reduction {key[1]} of model {key[0]}): that gradient was wrong. Use "
        f"the same batches on every rank, and fetch equally many. To skip a batch, skip it on all "
        f"ranks, by a shared decision such as `balancer.mean(bad) > 0`; where batches are made of "
        f"drawn indices, name those that are used as well: `with balancer.step(indices): ...`.",
        rank,
    )


def _assigned_apart(reported: Mapping[int, Reduced]) -> GradientsWrong:
    """Say which rank went by another assignment of the same step's samples."""
    sums = {rank: f"{one.checksum:#010x}" for rank, one in sorted(reported.items()) if one.checksum}
    rank, most, others = _odd_one(sums)
    return GradientsWrong(
        f"Rank {rank} used an assignment of samples with checksum {sums[rank]} in "
        f"{_words(reported[rank])}, and {listed(others)} used {most}: that gradient was "
        f"wrong. Either the lengths of `Balancer(cost=...)` differ between ranks, or evenstep has "
        f"a defect: please report it. Continue from the last checkpoint.",
        rank,
    )


def _odd_one(said: dict[int, str]) -> tuple[int, str, list[int]]:
    """Return the last rank that says something else than most, what these say, and who they are."""
    (most, _), *_ = Counter(said.values()).most_common()
    rank = next((rank for rank, one in reversed(said.items()) if one != most), max(said))
    return rank, most, [other for other, one in said.items() if one == most and other != rank]


def _words(one: Reduced) -> str:
    parts = [
        f"step {step}"
        if share is None or abs(share - 1) <= _SAME
        else f"{share:.3g} times step {step}"
        for step, share in sorted(one.shares.items())
    ]
    if one.maybe:
        parts.append("one of the steps " + ", ".join(map(str, one.maybe)))
    return " and ".join(parts) or "no step"


class DivergenceCheck:
    """Sends what this rank's reductions were made of, before it waits for the others in them.

    Rank 0 keeps books of those that some ranks have reported and some have not. They may come from
    several threads: its own come from its training thread.

    Args:
        router: carries messages.
        differ: called on rank 0, from any thread, when ranks went different ways.
    """

    kinds = (Reduced, StepsRequest, StepsReply)

    def __init__(self, router: Router, *, differ: Callable[[GradientsWrong], None]) -> None:
        self._router = router
        self._differ = differ
        self._lock = threading.Lock()
        self._reported: defaultdict[ReductionKey, dict[int, Reduced]] = defaultdict(dict)
        self._asking: defaultdict[ReductionKey, set[int]] = defaultdict(set)  # on rank 0
        self._has_asked = False  # on rank 0, for the reports that others hold

    def send(self, reduced: Sequence[Reduced]) -> None:
        """Send reductions to rank 0 outside of a report."""
        if reduced:
            self._router.to_leader(*reduced)

    def steps_of(self, key: ReductionKey) -> Sequence[int]:
        """Return the steps that a reduction may be of, as far as other ranks know; else none.

        For a rank that does not know which batch it has, in the backward of that reduction: others
        report it before they wait for this one.

        Raises:
            WorkerLostError: a worker was lost before it reported.
            GradientsWrongError, ValueError: gradients were wrong, on all ranks.
        """
        self._router.to_leader(StepsRequest(key))
        steps: Sequence[int] = self._router.get(("steps", *key))
        return steps

    def received(self, peer: int, message: Message) -> None:
        """Take in what a rank reduced, a question, or an answer."""
        match message:
            case Reduced(model, number):
                if (found := self._compare(peer, message)) is not None:
                    self._differ(found)
                if self._asking:
                    self._answer((model, number))
            case StepsRequest(key):
                self._ask(peer, key)
            case StepsReply(key, steps):
                self._router.put(("steps", *key), steps)

    def _compare(self, rank: int, reduced: Reduced) -> GradientsWrong | None:
        """Take in what a rank reduced; return how it differs from what others did, if it does."""
        key, world_size = (reduced.model, reduced.number), self._router.world_size
        with self._lock:
            reported = self._reported[key]
            reported[rank] = reduced
            if 2 * len(reported) > world_size and _differ(reported.values()):
                return _differing(reported, key)
            if len(reported) == world_size:
                del self._reported[key]
        return None

    def _ask(self, rank: int, key: ReductionKey) -> None:
        """On rank 0: answer now, or when others report; from now on they do so at once."""
        with self._router.changed:
            self._asking[key].add(rank)
        if not self._has_asked:
            self._has_asked = True
            self._router.to_workers(HoldNothing())
            self._router.to_leader(HoldNothing())
        self._answer(key)

    def _answer(self, key: ReductionKey) -> None:
        with self._lock:
            reported = list(self._reported.get(key, {}).values())
        possible = [one.shares.keys() | set(one.maybe) for one in reported]
        steps = sorted(set.intersection(*possible)) if possible else []
        with self._router.changed:
            is_all = len(reported) + len(self._asking.get(key, ())) == self._router.world_size
            asking = self._asking.pop(key, set()) if is_all or len(steps) == 1 else set()
        for rank in asking:
            self._router.to(rank, StepsReply(key, tuple(steps)))
