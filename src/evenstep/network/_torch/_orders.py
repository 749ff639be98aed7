"""What ranks send each other before they sum: the next bucket, and by which plan."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import count

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


def send_order(
    transport: AbstractTransport, servers: Sequence[int], number: int, job: BucketJob | None
) -> list[tuple[int, Pending]]:
    """On the lead worker: send what comes next to every rank that has no data.

    Args:
        transport: to them; one that matches by tag.
        servers: who has no data.
        number: of the order, from 0.
        job: the next bucket; None if nothing more will come.

    Returns:
        What is to be waited for, by rank.
    """
    if job is None:
        order = torch.zeros(_FIXED + transport.world_size, dtype=torch.int64)
    else:
        split = job.split
        fixed = [_SUM, job.num_elements, FLOATS.index(job.wire)]
        fixed += [split.epoch, split.chunk_bytes, split.min_bytes, int(job.ends), job.step]
        order = torch.tensor([*fixed, *split.parts])
    tag = _ORDER_TAGS + number % _MOST
    return [(peer, transport.send(order, peer, tag)) for peer in servers]


def orders(
    transport: AbstractTransport, lead: int, done: Callable[[BaseException | None], None]
) -> Iterator[BucketJob]:
    """On a rank without data: yield the buckets that the lead worker sends, until training ends.

    Args:
        transport: from it.
        lead: its rank.
        done: of the buckets.

    Raises:
        PeerFailed: the lead worker is gone.
        ValueError: it speaks of an older plan than before.
    """
    newest = -1
    for number in count():
        order = torch.empty(_FIXED + transport.world_size, dtype=torch.int64)
        try:
            transport.receive(order, lead, _ORDER_TAGS + number % _MOST)(None)
        except RuntimeError as error:
            raise PeerFailed(lead, str(error)) from error
        kind, num_elements, dtype, epoch, *sizes, ends, step = order[:_FIXED].tolist()
        if kind == _STOP:
            return
        check_epoch("ShardedReducer.serve()", epoch, newest)
        newest = epoch
        split = Split(tuple(order[_FIXED:].tolist()), epoch, *sizes)
        yield BucketJob(None, num_elements, FLOATS[dtype], split, done, ends=bool(ends), step=step)


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


class PlanMismatchError(PeerFailed):
    """Two ranks were about to sum the same gradients by different plans.

    Attributes:
        peer: the rank whose plan is the older one, or, with one epoch, the other rank.
    """


def begin_plan_check(
    job: BucketJob,
    number: int,
    transport: AbstractTransport,
    workers: Sequence[int],
    timeouts: Timeouts,
) -> None:
    """Compare the workers' plans once in every backward: a few bytes between every two.

    A rank that missed a plan would push ranges that no server waits for. Says what is in force here
    and asks the others; ``job`` waits for their answers before it sums.

    Args:
        job: the first bucket of the backward.
        number: of the backward, from 0.
        transport: between all ranks; one that matches by tag.
        workers: who is asked.
        timeouts: waits.
    """
    tag = _CHECK_TAGS + number % _MOST
    checksum = zlib.crc32(repr(job.split).encode())
    mine = torch.tensor([job.split.epoch, checksum, job.num_elements, job.wire.itemsize])
    peers = [rank for rank in workers if rank != transport.rank]
    theirs = {peer: torch.empty_like(mine) for peer in peers}
    receipts = [(peer, transport.receive(answer, peer, tag)) for peer, answer in theirs.items()]
    job.sends += [(peer, transport.send(mine, peer, tag)) for peer in peers]

    def compare() -> None:
        for peer, pending in receipts:
            timeouts.wait(pending, peer, part=_PART)
            if not torch.equal(theirs[peer], mine):
                raise _mismatch(transport.rank, mine.tolist(), peer, theirs[peer].tolist())

    job.check = compare


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
