"""Integers that workers tell each other under a key, and take when they need them."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .._types import IntArray
from ._channel import StarChannel
from ._unit_sums import Owner

Key = tuple[int, int, int]
"""Whose integers, of which round, and which of them."""

_KEPT_ROUNDS = 8  # a loop may be left for another one, and gone on with

_KINDS = ("<u1", "<u2", "<u4", "<i8")


class Mailbox:
    """One rank's side of messages that are no collective: any thread may take them, at any time.

    What a round left behind, since its loop was left early, is dropped in a later one.

    Args:
        rank: this process.
        world_size: number of workers.
        channel: connections to the others; None with one process.
        changed: notified when integers come, and when a worker was lost.
        owner: knows which workers are lost.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        channel: StarChannel | None,
        changed: threading.Condition,
        *,
        owner: Owner,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._channel = channel
        self._changed = changed
        self._owner = owner
        self._here: dict[Key, IntArray] = {}
        self._told: dict[Key, dict[int, list[int]]] = {}  # on rank 0, until all have told
        self._awaited: set[Key] = set()

    def misses(self, rank: int) -> bool:
        """Return whether a thread here waits for a message of ``rank``."""
        if self._rank != 0:
            return rank == 0 and bool(self._awaited)
        return any(rank not in self._told.get(key, ()) for key in tuple(self._awaited))

    def share(self, key: Key, ints: IntArray | None) -> IntArray:
        """Return on every rank the integers that rank 0 calls it with; None on the others.

        Raises:
            WorkerLostError: a worker was lost before they came.
        """
        if self._rank == 0:
            assert ints is not None
            self.post(key, ints)
            return ints
        return self.take(key)

    def gather(self, key: Key, numbers: list[int]) -> Callable[[], list[list[int]]]:
        """Send numbers, as many on every rank, and return what waits for those of all ranks.

        What is returned raises ``WorkerLostError`` if a worker was lost before it told its own.
        """
        if self._channel is None:
            return lambda: [numbers]
        if self._rank == 0:
            self._collect(0, key, numbers)
        else:
            self._channel.send(0, {"mail": key, "told": numbers})
        return lambda: self.take(key).reshape(self._world_size, -1).tolist()

    def post(self, key: Key, ints: IntArray) -> None:
        """On rank 0: send integers to every other worker."""
        if self._channel is not None:
            message = {"mail": key, **_written(ints)}
            for worker in range(1, self._world_size):
                self._channel.send(worker, message)

    def take(self, key: Key) -> IntArray:
        """Return what rank 0 posted under ``key``, once it is here; only once.

        Raises:
            WorkerLostError: a worker was lost before it came.
        """
        with self._changed:
            if key not in self._here:
                self._awaited.add(key)
        if key in self._awaited:
            # Not under the condition: it looks at the decisions, whose lock is held to publish.
            self._owner.check_left()  # the sender may have ended its run already
        with self._changed:
            self._await(key)
            kind, newest = key[0], key[1] - _KEPT_ROUNDS
            for old in [one for one in self._here if one[0] == kind and one[1] < newest]:
                del self._here[old]
            return self._here.pop(key)

    def received(self, peer: int, message: dict[str, Any]) -> bool:
        """Take in a message if it is one of these; return whether it was."""
        match message:
            case {"mail": key, "told": numbers}:
                self._collect(peer, tuple(key), numbers)
            case {"mail": key, "kind": kind, "data": data}:
                self._put(tuple(key), np.frombuffer(base64.b64decode(data), kind).astype(np.int64))
            case _:
                return False
        return True

    def _collect(self, rank: int, key: Key, numbers: list[int]) -> None:
        """On rank 0: take in what a rank told, and tell all if it was the last."""
        with self._changed:
            told = self._told.setdefault(key, {})
            told[rank] = numbers
            if len(told) < self._world_size:
                return
            rows = np.array([told[rank] for rank in range(self._world_size)], np.int64).ravel()
            self._put(key, rows)
            del self._told[key]
        self.post(key, rows)

    def _put(self, key: Key, ints: IntArray) -> None:
        with self._changed:
            self._here[key] = ints
            self._changed.notify_all()

    def _await(self, key: Key) -> None:
        try:
            while key not in self._here:
                self._owner.check()
                self._changed.wait()
        finally:
            self._awaited.discard(key)


def _written(ints: IntArray) -> dict[str, str]:
    """Return integers as JSON can hold them: in as few bytes each as they all fit into."""
    kind = next(kind for kind in _KINDS if np.array_equal(ints.astype(kind), ints))
    return {"kind": kind, "data": base64.b64encode(ints.astype(kind).tobytes()).decode()}
