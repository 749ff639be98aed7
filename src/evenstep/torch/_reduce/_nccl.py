"""Tensors over NCCL, on the device. Untested on several GPUs."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
import torch.distributed as dist

from ._transport import AbstractTransport, Pending


@final
class NcclTransport(AbstractTransport):
    """Sends and receives over an NCCL process group, one ``batch_isend_irecv`` per launch.

    **Untested on several GPUs.** NCCL matches what two ranks exchange by order, so the push of a
    chunk and the pull of the one before go out as one batch on every rank, and waits are those
    of the current stream, never of the host. That batches are alike on all ranks is tested with a
    transport in memory.

    Args:
        group: of this transport alone: a communicator runs what it is given in order.
    """

    in_order: ClassVar[bool] = True
    on_host: ClassVar[bool] = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.world_size = group.size()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._batch = _Batch()

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        return self._add(dist.irecv, buffer, source)

    def send(self, buffer: torch.Tensor, target: int, tag: int) -> Pending:
        return self._add(dist.isend, buffer, target)

    def launch(self) -> None:
        batch, self._batch = self._batch, _Batch()
        if batch.operations:
            batch.works = dist.batch_isend_irecv(batch.operations)

    def break_off(self) -> None:
        """Abort the communicator."""
        self._group.abort()

    def _add(self, operation: Any, buffer: torch.Tensor, peer: int) -> Pending:
        self._batch.operations.append(
            dist.P2POp(operation, buffer, self.ranks[peer], group=self._group)
        )
        return self._batch


@final
class _Batch:
    """Operations that go out together and are waited for together."""

    def __init__(self) -> None:
        self.operations: list[Any] = []
        self.works: list[Any] = []

    def wait(self, limit_s: float | None = None) -> None:
        for work in self.works:
            work.wait()
