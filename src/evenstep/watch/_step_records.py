"""What a rank tells of its steps, as bytes: a second's worth in one key of the run's store."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
class RankTold:
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
        head = _HEAD.pack(
            _VERSION,
            flags,
            len(self.records),
            host.step,
            host.lasted_s,
            host.cpu_s,
            host.throttled_s,
            host.run_delay_s,
            host.major_faults,
            host.alloc_retries,
        )
        return head + b"".join(map(_packed, self.records))


def unpacked(data: bytes) -> RankTold:
    """Return what ``RankTold.packed`` made to bytes.

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
    return RankTold(records, HostClues(*host) if flags & 1 else None, is_last=bool(flags & 2))


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
