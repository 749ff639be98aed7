"""What ranks send each other before they sum: the next bucket, and by which plan."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch

from ...exceptions import invalid
from .._plans._share_plan import Split
from ._pipeline import FLOATS, BucketJob
from ._transport import AbstractTransport, PeerFailed, Pending, Timeouts

_CHECK_TAGS = 1 << 30
_ORDER_TAGS = _CHECK_TAGS + (1 << 21)
_MOST = 1 << 20  # tags of a kind
_PART = 0.7  # of the limit: who does not even say what it is about to do is found first
_FIXED = 8  # integers before the parts
_STOP, _SUM = 0, 1


@final
class OrderBook:
    """On the lead worker: sends an order with every bucket to every rank that has no data.

    Args:
        transport: to them; one that matches by tag.
        servers: who has no data.
    """

    def __init__(self, transport: AbstractTransport, servers: Sequence[int]) -> None:
        self._transport = transport
        self._servers = tuple(servers)
        self._num_orders = 0

    def send(self, job: BucketJob) -> None:
        """Send what ``job`` is; it waits for the message at its end."""
        split = job.split
        kind = FLOATS.index(job.wire)
        fixed = [_SUM, job.num_elements, kind, split.epoch, split.chunk_bytes, split.min_bytes]
        order = torch.tensor([*fixed, int(job.ends), job.step, *split.parts])
        tag = self._next_tag()
        job.sends += [(peer, self._transport.send(order, peer, tag)) for peer in self._servers]

    def stop(self, *, limit_s: float) -> None:
        """Notify them that nothing more will come.

        Raises:
            RuntimeError: one of them is gone.
        """
        order = torch.zeros(_FIXED + self._transport.world_size, dtype=torch.int64)
        tag = self._next_tag()
        pending = [self._transport.send(order, peer, tag) for peer in self._servers]
        for message in pending:
            message.wait(limit_s)

    def _next_tag(self) -> int:
        self._num_orders += 1
        return _ORDER_TAGS + (self._num_orders - 1) % _MOST


@final
class Orders:
    """On a rank without data: receives what the lead worker sends.

    Args:
        transport: from it.
        lead: its rank.
    """

    def __init__(self, transport: AbstractTransport, lead: int) -> None:
        self._transport = transport
        self._lead = lead
        self._num_orders = 0
        self._epoch = -1

    def next(self, done: Callable[[BaseException | None], None]) -> BucketJob | None:
        """Wait for the next bucket, however long that takes; None when training has ended.

        Raises:
            PeerFailed: the lead worker is gone.
            ValueError: it speaks of an older plan than before.
        """
        order = torch.empty(_FIXED + self._transport.world_size, dtype=torch.int64)
        tag = _ORDER_TAGS + self._num_orders % _MOST
        self._num_orders += 1
        try:
            self._transport.receive(order, self._lead, tag).wait()
        except RuntimeError as error:
            raise PeerFailed(self._lead, str(error)) from error
        kind, num_elements, dtype, epoch, *sizes, ends, step = order[:_FIXED].tolist()
        if kind == _STOP:
            return None
        check_epoch("ShardedReducer.serve()", epoch, self._epoch)
        self._epoch = epoch
        split = Split(tuple(order[_FIXED:].tolist()), epoch, *sizes)
        wire, ends = FLOATS[dtype], bool(ends)
        return BucketJob(None, num_elements, wire, split, done, ends=ends, step=step)


def check_epoch(argument: str, epoch: int, newest: int) -> None:
    """Raise if a plan is older than the one in force.

    Raises:
        ValueError: it is.
    """
    if epoch < newest:
        rule = f"be given no plan older than that of epoch {newest}, which is in force"
        raise invalid(argument, rule, f"epoch {epoch}", "A late plan is to be dropped.")


def checked_workers(workers: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    """Return who has gradients, ascending.

    Raises:
        ValueError: they are no ranks, or none.
    """
    if workers is None:
        return tuple(range(world_size))
    ranks = tuple(sorted(workers))
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < world_size:
        rule = f"be different ranks from 0 to {world_size - 1}, one at least"
        raise invalid("ShardedReducer(workers=...)", rule, tuple(workers), "The rest will serve.")
    return ranks


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
        tag = _CHECK_TAGS + self._num_calls % _MOST
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
