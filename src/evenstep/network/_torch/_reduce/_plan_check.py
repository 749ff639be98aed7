"""All workers say by which plan they are about to sum, before anything is summed by it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import final

import torch

from ._bucket_job import BucketJob
from ._timeouts import Timeouts
from ._transport import AbstractTransport, Pending

_TAGS = 1 << 30
_MOST = 1 << 20
_PART = 0.7  # of the limit: who does not even say what it is about to do is found first


class PlanMismatchError(RuntimeError):
    """Two ranks were about to sum the same gradients by different plans.

    Attributes:
        peer: the rank whose plan is the older one, or, with one epoch, the other rank.
    """

    def __init__(self, peer: int, message: str) -> None:  # the class says it
        super().__init__(message)
        self.peer = peer


@final
class PlanCheck:
    """Compares the workers' plans once in every backward: a few bytes between every two.

    A rank that missed a plan would push ranges that no server waits for.

    Args:
        transport: between all ranks; one that matches by tag.
        workers: who is called.
        timeouts: waits.
    """

    def __init__(
        self, transport: AbstractTransport, workers: Sequence[int], timeouts: Timeouts
    ) -> None:
        self._transport = transport
        self._peers = [rank for rank in workers if rank != transport.rank]
        self._timeouts = timeouts
        self._num_calls = 0

    def begin(self, job: BucketJob) -> None:
        """Say what is in force here and ask the others; ``job`` waits for it before it sums."""
        tag = _TAGS + self._num_calls % _MOST
        self._num_calls += 1
        mine = torch.tensor(_stamp(job))
        receipts = []
        for peer in self._peers:
            theirs = torch.empty_like(mine)
            receipts.append((peer, self._transport.receive(theirs, peer, tag), theirs))
        job.sends += [(peer, self._transport.send(mine, peer, tag)) for peer in self._peers]
        job.checks.append(partial(self._compare, mine, receipts))

    def _compare(
        self, mine: torch.Tensor, receipts: Sequence[tuple[int, Pending, torch.Tensor]]
    ) -> None:
        """Wait for all answers and compare them.

        Raises:
            PlanMismatchError: one is another.
            PeerFailed: a rank is gone.
        """
        for peer, pending, theirs in receipts:
            self._timeouts.wait(pending, peer, part=_PART)
            if not torch.equal(theirs, mine):
                raise _mismatch(self._transport.rank, mine.tolist(), peer, theirs.tolist())


def _stamp(job: BucketJob) -> list[int]:
    checksum = zlib.crc32(repr(job.split).encode())
    return [job.split.epoch, checksum, job.num_elements, job.wire.itemsize]


def _mismatch(rank: int, mine: list[int], peer: int, theirs: list[int]) -> PlanMismatchError:
    if mine[0] != theirs[0]:
        late = rank if mine[0] < theirs[0] else peer
        what = (
            f"by the plan of epoch {mine[0]}, rank {peer} by that of epoch {theirs[0]}: "
            f"rank {late} did not get the newer one in time"
        )
    elif mine[1] != theirs[1]:
        late, what = peer, f"by another plan of epoch {mine[0]} than rank {peer}"
    else:
        late = peer
        what = (
            f"a bucket of {mine[2]} gradients, {mine[3]} bytes each, rank {peer} one of "
            f"{theirs[2]}, {theirs[3]} bytes each"
        )
    return PlanMismatchError(
        late,
        f"Rank {rank} sums {what}. Call `adopt` with the same split before the same step on all "
        f"ranks, and train the same model.",
    )
