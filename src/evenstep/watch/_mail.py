"""What ranks tell rank 0, through the run's own store: a few slots a rank, never a wait."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, final

from ._step_records import RankTold, unpacked

_NUM_SLOTS = 16  # keys of a rank that rank 0 may be late with
_NUMBER = struct.Struct("<Q")


class MailStore(Protocol):
    """What a mail needs of a ``torch.distributed.Store``. None of it waits for a key."""

    def set(self, key: str, value: bytes) -> None:
        """Write a key."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are there."""

    def get(self, key: str) -> bytes:
        """Return a key that is there."""

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""


@dataclass(frozen=True, slots=True)
class RankHello:
    """Who a rank is.

    Attributes:
        host: name of its machine.
        device: its device, in words.
    """

    host: str
    device: str


def _slot(rank: int, number: int) -> str:
    return f"{rank}/{number % _NUM_SLOTS}"


@final
class RankSender:
    """Sends what one rank tells, a key each. A reader that is late finds the newest few.

    Args:
        store: of the run, with a prefix of the watch's own.
        rank: the sender's.

    Attributes:
        num_bytes: sent so far.
    """

    def __init__(self, store: MailStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._number = 0
        self.num_bytes = 0

    def hello(self, hello: RankHello) -> None:
        """Say who this rank is."""
        text = json.dumps([hello.host, hello.device])
        self._store.set(f"{self._rank}/hello", text.encode())

    def send(self, told: RankTold) -> None:
        """Write the next key; where the slots are full, over the oldest one."""
        data = _NUMBER.pack(self._number) + told.packed()
        self._store.set(_slot(self._rank, self._number), data)
        self._number += 1
        self.num_bytes += len(data)


@final
class RankReader:
    """Reads what the other ranks tell, and deletes what it has read.

    Args:
        store: of the run, with the senders' prefix.
        ranks: the senders.
    """

    def __init__(self, store: MailStore, ranks: range) -> None:
        self._store = store
        self._next = dict.fromkeys(ranks, 0)
        self._strangers = list(ranks)

    def hellos(self) -> Iterator[tuple[int, RankHello]]:
        """Yield who has said so since the last call."""
        for rank in tuple(self._strangers):
            if (data := self._take(f"{rank}/hello")) is not None:
                self._strangers.remove(rank)
                yield rank, RankHello(*json.loads(data))

    def read(self) -> Iterator[tuple[int, RankTold]]:
        """Yield what came since the last call, each rank's in order.

        Raises:
            ValueError: a key was not written by this version.
        """
        for rank in self._next:
            while (data := self._take(_slot(rank, self._next[rank]))) is not None:
                (number,) = _NUMBER.unpack_from(data)
                if number >= self._next[rank]:  # more: the slots before it were written over
                    self._next[rank] = number + 1
                    yield rank, unpacked(data[_NUMBER.size :])

    def _take(self, key: str) -> bytes | None:
        """Return a key and delete it; None where it is not there."""
        if not self._store.check([key]):
            return None
        data = bytes(self._store.get(key))
        self._store.delete_key(key)
        return data
