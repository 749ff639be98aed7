"""What a rank tells of its steps: bytes in the run's own store, put together to rows on rank 0."""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple, Protocol, final

from .._diagnosis import HostClues, Phase, StepClues

_VERSION = 1
_HEAD = struct.Struct("<BBHQ4dQQ")
_NUM_PHASES = len(Phase)
_RECORD = struct.Struct(f"<QII{_NUM_PHASES}IIIQ")
_MOST_U32 = 2**32 - 1


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


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank tells in one key.

    Attributes:
        records: its newest steps, in order.
        host: what the process went through meanwhile; None in a key that has no look.
        is_last: whether no other key follows.
    """

    records: tuple[StepRecord, ...]
    host: HostClues | None
    is_last: bool = False

    def packed(self) -> bytes:
        """Return it as bytes, about 76 for a step."""
        host = self.host or HostClues(0, 0.0)
        flags = (self.host is not None) | 2 * self.is_last
        head = _HEAD.pack(_VERSION, flags, len(self.records), *astuple(host))
        return head + b"".join(map(_packed, self.records))


def unpacked(data: bytes) -> RankReport:
    """Return what ``RankReport.packed`` made to bytes.

    Raises:
        ValueError: it was not, or by another version.
    """
    try:
        version, flags, num, *host = _HEAD.unpack_from(data)
        if version != _VERSION or len(data) != _HEAD.size + num * _RECORD.size:
            raise ValueError(f"{len(data)} bytes of version {version}")
        records = tuple(map(_unpacked, _RECORD.iter_unpack(data[_HEAD.size :])))
    except struct.error as error:
        raise ValueError(f"{len(data)} bytes: {error}") from error
    return RankReport(records, HostClues(*host) if flags & 1 else None, is_last=bool(flags & 2))


def _packed(record: StepRecord) -> bytes:
    clues = record.clues
    times = (*record.spent_us, clues.gc_us, clues.compile_us)
    if min(times) < 0 or max(times) > _MOST_U32:
        times = tuple([min(max(us, 0), _MOST_U32) for us in times])
    return _RECORD.pack(record.step, record.num_steps, record.num_samples, *times, clues.size)


def _unpacked(fields: tuple[int, ...]) -> StepRecord:
    step, num_steps, num_samples, *times = fields
    gc_us, compile_us, size = times[_NUM_PHASES:]
    clues = StepClues(gc_us=gc_us, compile_us=compile_us, size=size)
    return StepRecord(step, num_steps, tuple(times[:_NUM_PHASES]), clues, num_samples)


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

    def send(self, report: RankReport) -> None:
        """Write the next key; where the slots are full, over the oldest one."""
        data = _NUMBER.pack(self._number) + report.packed()
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

    def read(self) -> Iterator[tuple[int, RankReport]]:
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


_MOST_OPEN = 4096  # records of a rank that wait for another's


@final
class RankMerger:
    """Puts together what the ranks tell of the same steps, once all have told of them.

    Ranks sum short steps by groups of sizes of their own, of which each is a multiple of the
    smaller ones: the largest counts. Steps that some rank tells nothing of are left out.

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
                continue  # in the middle of it, a rank told nothing of some step
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
