"""Several models in DDP, whose forwards have collectives of their own: all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel


class SeveralDdps:
    """Has the forwards of several DDPs wait for no rank, in steps of unlike numbers of forwards.

    Two of a DDP's forwards are collective: the first after its first backward, which settles its
    buckets, and the first of every step where it broadcasts buffers. With one model all ranks
    meet there. With two, a rank of one micro-batch goes from the first model's forward to its
    all-reduce, while one of two goes to the second model's forward: both wait for ever. So both
    collectives run at the start of a step, for all models in the order of ``prepare``.

    The three attributes are DDP's own; tests hold them for the pinned version.

    Args:
        ddps: in the order that all ranks share.
    """

    def __init__(self, ddps: Sequence[DistributedDataParallel]) -> None:
        self._ddps = tuple(ddps)

    def meet(self) -> None:
        """Run what their next forwards would. Collective, before the first forward of a step."""
        for ddp in self._ddps:
            ddp.reducer._rebuild_buckets()
            if ddp._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
                ddp._sync_buffers()  # type: ignore[no-untyped-call]
                ddp.require_forward_param_sync = False  # DDP itself sets it after its backward
