"""What the lead worker tells ranks without data: what comes next, and how it is shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from ....exceptions import invalid
from ..._plans._split import Split
from ._bucket_job import BucketJob
from ._sums import FLOATS
from ._transport import AbstractTransport, PeerFailed

_TAGS = (1 << 30) + (1 << 21)
_MOST = 1 << 20
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
        """Tell them that there is nothing more to come.

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
        return _TAGS + (self._num_orders - 1) % _MOST


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
        tag = _TAGS + self._num_orders % _MOST
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
