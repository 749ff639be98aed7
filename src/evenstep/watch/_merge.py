"""The records of all ranks, put together to rows of the same steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

from ._step_records import StepRecord, joined

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
