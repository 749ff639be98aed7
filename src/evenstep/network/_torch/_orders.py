"""What the lead worker sends to ranks without data: the next bucket, and by which plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch

from ...exceptions import invalid
from .._plans._share_plan import Split
from ._pipeline import FLOATS, BucketJob
from ._transport import AbstractTransport, PeerFailed, Pending

_TAGS = 1 << 30
_MOST = 1 << 20  # tags
_FIXED = 7  # integers before the parts
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
        fixed += [split.epoch, split.chunk_bytes, split.min_bytes, job.step]
        order = torch.tensor([*fixed, *split.parts])
    tag = _TAGS + number % _MOST
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
            transport.receive(order, lead, _TAGS + number % _MOST)(None)
        except RuntimeError as error:
            raise PeerFailed(lead, str(error)) from error
        kind, num_elements, dtype, epoch, *sizes, step = order[:_FIXED].tolist()
        if kind == _STOP:
            return
        check_epoch("ShardedReducer.serve()", epoch, newest)
        newest = epoch
        split = Split(tuple(order[_FIXED:].tolist()), epoch, *sizes)
        yield BucketJob(None, num_elements, FLOATS[dtype], split, done, step)


def check_epoch(argument: str, epoch: int, newest: int) -> None:
    """Raise if a plan is older than the one in force.

    Raises:
        ValueError: it is.
    """
    if epoch < newest:
        rule = f"be given no plan older than that of epoch {newest}, which is in force"
        raise invalid(argument, rule, f"epoch {epoch}", "A late plan is to be dropped.")
