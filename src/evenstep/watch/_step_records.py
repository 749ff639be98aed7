"""A rank's reports of its steps: bytes in the run's own store, put together to rows on rank 0."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

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


Row = tuple[StepRecord, ...]
"""What all ranks reported of the same step, or of some short ones together."""


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


class RankReport(Struct, frozen=True, array_like=True, tag=3):
    """What one rank reports in one key, as MessagePack; the tag is the version of this form.

    Attributes:
        records: its newest steps, in order.
        clues: what the process went through meanwhile; None in a key that has no look.
        host: name of its machine.
        device: its device, in words.
        is_last: whether no other key follows.
        number: of the key, from 0.
        step: the one under way.
        phase: what the rank is in, of ``Phase``.
        lasted_s: for how long the step under way has lasted, at least.
    """

    records: tuple[StepRecord, ...]
    clues: HostClues | None = None
    host: str = ""
    device: str = ""
    is_last: bool = False
    number: int = 0
    step: int = 0
    phase: int = 0
    lasted_s: float = 0.0


_NUM_SLOTS = 16  # keys of a rank that rank 0 may be late with


@final
class RankMail:
    """The reports of ranks, a key each. A reader that is late finds the newest few of a rank.

    Args:
        store: like a ``torch.distributed.Store``, with a prefix of the watch's own. It is asked to
            ``set``, ``check``, ``get`` and ``delete_key``, and never to wait for a key.

    Attributes:
        num_bytes: sent so far.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._next: defaultdict[int, int] = defaultdict(int)  # by rank, the number of its next key
        self.num_bytes = 0

    def send(self, rank: int, report: RankReport) -> None:
        """Write a rank's next key; where the slots are full, over its oldest one."""
        data = encode(replace(report, number=self._next[rank]))
        self._store.set(self._slot(rank), data)
        self._next[rank] += 1
        self.num_bytes += len(data)

    def read(self, rank: int) -> Iterator[RankReport]:
        """Yield what came of a rank since the last call, in order, and delete it.

        Raises:
            msgspec.MsgspecError: a key was not written by this version.
        """
        while self._store.check([slot := self._slot(rank)]):
            report = decode(bytes(self._store.get(slot)), type=RankReport)
            self._store.delete_key(slot)
            if report.number >= self._next[rank]:  # more: slots before it were written over
                self._next[rank] = report.number + 1
                yield report

    def _slot(self, rank: int) -> str:
        return f"{rank}/{self._next[rank] % _NUM_SLOTS}"


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
        self._open = [deque[StepRecord](maxlen=_MOST_OPEN) for _ in range(world_size)]

    def add(self, rank: int, records: Sequence[StepRecord]) -> None:
        """Take in a rank's next records, in order."""
        self._open[rank].extend(records)

    def take(self) -> list[Row]:
        """Return the rows that are complete, one record per rank in each."""
        ends = [{record.step for record in known} for known in self._open]
        rows = []
        for end in sorted(set.intersection(*ends)):
            taken = [_up_to(end, known) for known in self._open]
            begin = max(records[0].begin for records in taken)
            taken = [[one for one in records if one.begin >= begin] for records in taken]
            row = tuple(joined(records) for records in taken if records)
            # Fewer: in the middle, a rank did not report some step.
            if [record.num_steps for record in row] == [end - begin + 1] * len(taken):
                rows.append(row)
        return rows


def _up_to(end: int, known: deque[StepRecord]) -> list[StepRecord]:
    """Take away a rank's records up to the one that ends with this step."""
    taken = [known.popleft()]
    while taken[-1].step < end:
        taken.append(known.popleft())
    return taken
