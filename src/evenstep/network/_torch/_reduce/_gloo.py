"""Tensors over gloo, on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from ._transport import AbstractTransport, PeerFailed, Pending

_FOR_EVER = timedelta(days=365)
_BREAK = (1 << 31) - 1  # a tag that no rank sends with


@final
class GlooTransport(AbstractTransport):
    """Sends and receives over a gloo process group, matched by tag.

    Nothing is waited for longer than a timeout allows: a wait that runs into gloo's own
    timeout breaks the whole group before any rank could be told why. ``Timeouts`` keeps the time.

    Args:
        group: of this transport alone: it is broken when a rank is lost.
        ranks: what errors call the ranks of the transport; None is their global numbers.
        order: which rank of the group each rank of the transport is; None is the same one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        ranks: Iterable[int] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self._group = group
        self._order = tuple(range(group.size()) if order is None else order)
        self.rank = self._order.index(group.rank())
        self.world_size = group.size()
        names = dist.get_process_group_ranks(group)
        self.ranks = tuple([names[one] for one in self._order] if ranks is None else ranks)

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        with _naming(source):
            return _GlooPending(self._group.recv([buffer], self._order[source], tag), buffer)

    def send(self, buffer: torch.Tensor, target: int, tag: int) -> Pending:
        with _naming(target):
            return _GlooPending(self._group.send([buffer], self._order[target], tag), buffer)

    def break_off(self) -> None:
        """Let a receive time out that no rank sends to: gloo then closes every connection.

        A hack. `ProcessGroup.abort` does nothing for gloo (torch 2.13), a wait of another thread
        cannot be interrupted, and a group that is destroyed under one takes the process along.
        """
        for peer in range(self.world_size):
            if peer != self._group.rank():
                with suppress(RuntimeError):
                    self._group.recv([torch.zeros(1)], peer, _BREAK).wait(timedelta(milliseconds=1))


@contextmanager
def _naming(peer: int) -> Iterator[None]:
    """Say of whom: where a connection is closed already, gloo refuses what is asked of it."""
    try:
        yield
    except RuntimeError as error:
        raise PeerFailed(peer, str(error)) from error


@final
class _GlooPending:
    """A work of gloo's, and the tensor that must outlive it."""

    __slots__ = ("_buffer", "_work")

    def __init__(self, work: Any, buffer: torch.Tensor) -> None:
        self._work = work
        self._buffer = buffer

    def wait(self, limit_s: float | None = None) -> None:
        self._work.wait(_FOR_EVER if limit_s is None else timedelta(seconds=limit_s))
