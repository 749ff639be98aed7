"""Numbers that workers send each other beside the plans: integers by key, units of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from .._types import IntArray
from ._message_kinds import MailKey, Message, NumbersReply, NumbersReport, Units
from ._router import Router

_KEPT_ROUNDS = 8  # a loop may be left for another one, and gone on with

_KINDS = ("<u1", "<u2", "<u4", "<i8")


class Mailbox:
    """One rank's side of messages that are no collective: any thread may take them, at any time.

    What a round left behind, since its loop was left early, is dropped in a later one.

    Args:
        router: carries messages.
    """

    kinds = (NumbersReport, NumbersReply)

    def __init__(self, router: Router) -> None:
        self._router = router
        self._sent: dict[MailKey, dict[int, Sequence[int]]] = {}  # on rank 0, until all have sent
        self._num_shared: dict[int, int] = {}

    def check(self) -> None:
        """Raise if a worker was lost.

        Raises:
            WorkerLostError: a worker was lost.
            RanksDivergedError: ranks reduced the gradients of different batches together.
        """
        self._router.owner.check()

    def share(self, key: MailKey, ints: IntArray | None) -> IntArray:
        """Return on every rank the integers that rank 0 calls it with; None on the others.

        Raises:
            WorkerLostError: a worker was lost before they came.
        """
        name = _name(key)
        count = self._num_shared[key[0]] = self._num_shared.get(key[0], 0) + 1
        if ints is None:
            with self._waiting(name, count):
                return self.take(key)
        self.post(key, ints)
        self._router.sent[name] = count
        return ints

    def gather(self, key: MailKey, numbers: list[int]) -> Callable[[], list[list[int]]]:
        """Send numbers, as many on every rank, and return what waits for those of all ranks.

        What is returned raises ``WorkerLostError`` if a worker was lost before it sent its own.
        """
        self._router.to_leader(NumbersReport(key, tuple(numbers)))
        self._router.sent[_name(key)] = key[1]

        def numbers_of_all() -> list[list[int]]:
            with self._waiting(_name(key), key[1]):
                return self.take(key).reshape(self._router.world_size, -1).tolist()

        return numbers_of_all

    def post(self, key: MailKey, ints: IntArray) -> None:
        """On rank 0: send integers to every other worker, in as few bytes each as they fit into."""
        kind = next(kind for kind in _KINDS if np.array_equal(ints.astype(kind), ints))
        self._router.to_workers(NumbersReply(key, kind, ints.astype(kind).tobytes()))

    def take(self, key: MailKey) -> IntArray:
        """Return what rank 0 posted under ``key``, once it is here; only once.

        Raises:
            WorkerLostError: a worker was lost before it came.
        """
        ints: IntArray = self._router.get(
            key, lacks=lambda rank: rank not in self._sent.get(key, ())
        )
        self._router.drop(lambda one: one[0] == key[0] and one[1] < key[1] - _KEPT_ROUNDS)
        return ints

    @contextmanager
    def _waiting(self, name: str, count: int) -> Iterator[None]:
        """Have the watch on hangs know for what this rank waits within the block."""
        self._router.awaited[name] = count
        try:
            yield
        finally:
            self._router.awaited.pop(name, None)  # two threads may have waited

    def received(self, peer: int, message: Message) -> None:
        """Take in integers of a rank, or for this one."""
        match message:
            case NumbersReport(key, numbers):
                self._collect(peer, key, numbers)
            case NumbersReply(key, kind, data):
                self._router.put(key, np.frombuffer(data, kind).astype(np.int64))

    def _collect(self, rank: int, key: MailKey, numbers: Sequence[int]) -> None:
        """On rank 0: take in what a rank sent, and send the whole to all if it was the last."""
        with self._router.changed:
            by_rank = self._sent.setdefault(key, {})
            by_rank[rank] = numbers
            if len(by_rank) < self._router.world_size:
                return
            rows = np.array([by_rank[rank] for rank in range(len(by_rank))], np.int64).ravel()
            self._router.put(key, rows)
            del self._sent[key]
        self.post(key, rows)


def _name(key: MailKey) -> str:
    """Return what the watch on hangs calls the messages about one loader."""
    return f"the order of loader {key[0]}" if key[0] >= 0 else f"the samples of loader {~key[0]}"


class UnitSum:
    """The units of one step over all ranks.

    Attributes:
        total: the sum; None while it is not known.
    """

    def __init__(self) -> None:
        self.total: float | None = None


class UnitSums:
    """One rank's side of the sums: each rank sends units to rank 0, which sends back the sum.

    One small message each way a step, sent without waiting. All ranks divide by the same bits,
    since rank 0 alone adds up.

    Args:
        router: carries messages.
        came_to: called with each step whose units this rank has sent.
    """

    kinds = (Units,)

    def __init__(self, router: Router, *, came_to: Callable[[int], None]) -> None:
        self._router = router
        self._came_to = came_to
        self._arrived: dict[int, dict[int, float]] = {}  # on rank 0, by step
        self._awaited: dict[int, UnitSum] = {}

    def add(self, step: int, units: float) -> UnitSum:
        """Send this rank's units of ``step``; return where the sum will be found."""
        self._awaited[step] = awaited = UnitSum()
        self._router.to_leader(Units(step, units))
        self._came_to(step)
        return awaited

    def wait(self, unit_sum: UnitSum) -> None:
        """Wait until a sum is known.

        Raises:
            WorkerLostError: a worker was lost whose units are missing.
        """
        self._router.need(lambda: unit_sum.total is not None)

    def waits_for(self, rank: int) -> int | None:
        """Return a step whose sum misses ``rank``'s message; None if there is none.

        For a rank that has left: what it sent came before its goodbye, so the rest never will.
        """
        if self._router.rank != 0:
            return min(tuple(self._awaited), default=None) if rank == 0 else None
        with self._router.changed:
            return min((k for k, known in self._arrived.items() if rank not in known), default=None)

    def received(self, peer: int, message: Message) -> None:
        """Take in units, or a sum."""
        assert isinstance(message, Units)
        step, total = message.step, message.units
        if self._router.rank == 0:  # if they are the last, all ranks are sent the sum
            with self._router.changed:
                arrived = self._arrived.setdefault(step, {})
                arrived[peer] = message.units
                if len(arrived) < self._router.world_size:
                    return
                del self._arrived[step]
            total = math.fsum(arrived.values())
            self._router.to_workers(Units(step, total))
        awaited = self._awaited.pop(step, None)
        if awaited is not None:
            awaited.total = total
            self._router.notify()
