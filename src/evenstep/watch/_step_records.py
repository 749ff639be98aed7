"""A rank's reports of its steps: bytes in the run's own store, put together to rows on rank 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from msgspec import Struct
from msgspec.msgpack import decode, encode
from msgspec.structs import replace

from .._diagnosis import HostClues, StepClues


class StepRecord(NamedTuple):
    """One rank's step, or several in a row together: all but the first two are sums.

    Attributes:
        step: the newest of them.
        num_steps: how many.
        spent_us: times by phase, as ``time_by_phase`` gives them.
        clues: what else was noticed.
        num_samples: leading dimensions of the inputs of its forwards in training.
    """

    step: int
    num_steps: int
    spent_us: tuple[int, ...]
    clues: StepClues
    num_samples: int

    @property
    def begin(self) -> int:
        """The first of the steps."""
        return self.step - self.num_steps + 1


def joined(records: Sequence[StepRecord]) -> StepRecord:
    """Return records of steps in a row, at least one, as one."""
    if len(records) == 1:
        return records[0]
    return StepRecord(
        records[-1].step,
        sum(record.num_steps for record in records),
        tuple(map(sum, zip(*(record.spent_us for record in records), strict=True))),
        StepClues(
            gc_us=sum(record.clues.gc_us for record in records),
            compile_us=sum(record.clues.compile_us for record in records),
            size=sum(record.clues.size for record in records),
        ),
        sum(record.num_samples for record in records),
    )


def grouped(records: Sequence[StepRecord], size: int) -> tuple[list[StepRecord], list[StepRecord]]:
    """Return the groups of ``size`` steps that are complete, and what is left for the next time.

    Groups end where the number of the next step is a multiple of their size, so that those of all
    ranks fit into each other, whatever sizes the ranks use: powers of two.
    """
    if size == 1:
        return list(records), []
    done: list[StepRecord] = []
    left: list[StepRecord] = []
    for record in records:
        if left and record.begin != left[-1].step + 1:  # one between them is not known
            done.append(joined(left))
            left = []
        left.append(record)
        if (record.step + 1) % size == 0:
            done.append(joined(left))
            left = []
    return done, left


class RankReport(Struct, frozen=True, array_like=True, tag=1):
    """What one rank reports in one key, as MessagePack; the tag is the version of this form.

    Attributes:
        records: its newest steps, in order.
        host: what the process went through meanwhile; None in a key that has no look.
        is_last: whether no other key follows.
        number: of the key, from 0.
    """

    records: tuple[StepRecord, ...]
    host: HostClues | None
    is_last: bool = False
    number: int = 0


_NUM_SLOTS = 16  # keys of a rank that rank 0 may be late with


class MailStore(Protocol):
    """What a mail needs of a ``torch.distributed.Store``. None of it waits for a key."""

    def set(self, key: str, value: bytes) -> None:
        """Write a key."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""

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
    """Sends one rank's reports, a key each. A reader that is late finds the newest few.

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
        self._store.set(f"{self._rank}/hello", encode(hello))

    def send(self, report: RankReport) -> None:
        """Write the next key; where the slots are full, over the oldest one."""
        data = encode(replace(report, number=self._number))
        self._store.set(_slot(self._rank, self._number), data)
        self._number += 1
        self.num_bytes += len(data)


@final
class RankReader:
    """Reads the other ranks' reports, and deletes what it has read.

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
                yield rank, decode(data, type=RankHello)

    def read(self) -> Iterator[tuple[int, RankReport]]:
        """Yield what came since the last call, each rank's in order.

        Raises:
            msgspec.MsgspecError: a key was not written by this version.
        """
        for rank in self._next:
            while (data := self._take(_slot(rank, self._next[rank]))) is not None:
                report = decode(data, type=RankReport)
                if report.number >= self._next[rank]:  # more: slots before it were written over
                    self._next[rank] = report.number + 1
                    yield rank, report

    def _take(self, key: str) -> bytes | None:
        """Return a key and delete it; None where it is not there."""
        if not self._store.check([key]):
            return None
        data = bytes(self._store.get(key))
        self._store.delete_key(key)
        return data


_MOST_OPEN = 4096  # records of a rank that wait for another's


@final
class RankMerger:
    """Puts together what the ranks report of the same steps, once all have reported them.

    Ranks sum short steps by groups of sizes of their own, of which each is a multiple of the
    smaller ones: the largest counts. Steps that some rank does not report are left out.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._open: list[deque[StepRecord]] = [deque() for _ in range(world_size)]

    def add(self, rank: int, records: Sequence[StepRecord]) -> None:
        """Take in a rank's next records, in order."""
        known = self._open[rank]
        known.extend(records)
        while len(known) > _MOST_OPEN:
            known.popleft()

    def take(self) -> list[tuple[StepRecord, ...]]:
        """Return the rows that are complete, one record per rank in each."""
        rows = []
        while (row := self._next()) is not None:
            rows.append(row)
        return rows

    def _next(self) -> tuple[StepRecord, ...] | None:
        """Return the next row; None while it is not there."""
        while all(self._open):
            heads = [known[0] for known in self._open]
            if len({(head.step, head.num_steps) for head in heads}) == 1:  # as nearly always
                for known in self._open:
                    known.popleft()
                return tuple(heads)
            begin = max(known[0].begin for known in self._open)
            if all(known[0].begin == begin for known in self._open):
                row = self._ended_together()
                if row is None or len({record.num_steps for record in row}) == 1:
                    return row
                continue  # in the middle of it, a rank did not report some step
            for known in self._open:
                while known and known[0].begin < begin:
                    known.popleft()
        return None

    def _ended_together(self) -> tuple[StepRecord, ...] | None:
        """Return records from the same begin to the same end; None while one has not got there."""
        end = max(known[0].step for known in self._open)
        while True:
            ends = [_end_from(known, end) for known in self._open]
            if None in ends:
                return None
            latest = max(found for found in ends if found is not None)
            if latest == end:
                break
            end = latest
        row = []
        for known in self._open:
            taken = [known.popleft()]
            while taken[-1].step < end:
                taken.append(known.popleft())
            row.append(joined(taken))
        return tuple(row)


def _end_from(known: Sequence[StepRecord], end: int) -> int | None:
    """Return where a rank's first record ends that reaches ``end``; None if none does yet."""
    return next((record.step for record in known if record.step >= end), None)
