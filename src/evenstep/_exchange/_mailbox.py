"""Integers that rank 0 sends to every worker under a key, and each takes when it needs them."""

from __future__ import annotations

import base64
import threading
from typing import Any

import numpy as np

from .._types import IntArray
from ._channel import StarChannel
from ._unit_sums import Owner

Key = tuple[int, int, int]
"""Whose integers, of which epoch, and which of them: later epochs have larger numbers."""

_KINDS = ("<u1", "<u2", "<u4", "<i8")


class Mailbox:
    """One rank's side of messages that are no collective: any thread may take them, at any time.

    Rank 0 never waits. The others wait until what they ask for is here. What an epoch left
    behind, since its loop was left early, is dropped when the next one begins.

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
        self._awaited: set[Key] = set()

    @property
    def is_awaited(self) -> bool:
        """Whether a thread of this rank waits for rank 0."""
        return bool(self._awaited)

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

    def post(self, key: Key, ints: IntArray) -> None:
        """On rank 0: send integers to every other worker."""
        if self._channel is not None:
            message = {"mail": key, **_written(ints)}
            for worker in range(1, self._world_size):
                self._channel.send(worker, message)

    def take(self, key: Key) -> IntArray:
        """Elsewhere: return what rank 0 posted under ``key``, once it is here; only once.

        Raises:
            WorkerLostError: a worker was lost before it came.
        """
        with self._changed:
            if key not in self._here:
                self._await(key)
            for old in [one for one in self._here if one[0] == key[0] and one[1] < key[1]]:
                del self._here[old]
            return self._here.pop(key)

    def received(self, message: dict[str, Any]) -> bool:
        """Take in a message if it is one of these; return whether it was."""
        match message:
            case {"mail": key, "kind": kind, "data": data}:
                ints = np.frombuffer(base64.b64decode(data), kind).astype(np.int64)
                with self._changed:
                    self._here[tuple(key)] = ints
                    self._changed.notify_all()
                return True
        return False

    def _await(self, key: Key) -> None:
        self._awaited.add(key)
        try:
            self._owner.check_left()  # rank 0 may have ended its run before
            while key not in self._here:
                self._owner.check()
                self._changed.wait()
        finally:
            self._awaited.discard(key)


def _written(ints: IntArray) -> dict[str, str]:
    """Return integers as JSON can hold them: in as few bytes each as they all fit into."""
    kind = next(kind for kind in _KINDS if np.array_equal(ints.astype(kind), ints))
    return {"kind": kind, "data": base64.b64encode(ints.astype(kind).tobytes()).decode()}
