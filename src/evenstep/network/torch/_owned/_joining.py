"""Which ranks share a model, and what carries tensors between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ....exceptions import invalid
from .._reduce._gloo import GlooTransport
from ._carrier import Carrier


def ranks_of(process_group: dist.ProcessGroup | None) -> tuple[tuple[int, ...], int]:
    """Return the global ranks that take part, and which of them this process is.

    Raises:
        ValueError: this process is none of them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return (0,), 0
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    ranks = tuple(dist.get_process_group_ranks(group))
    if dist.get_rank() not in ranks:
        rule, got = "have this rank in it", f"ranks {ranks} on rank {dist.get_rank()}"
        remedy = "Make it on the ranks that train the model."
        raise invalid("ShardedOptimizer(process_group=...)", rule, got, remedy)
    return ranks, ranks.index(dist.get_rank())


def join(ranks: Sequence[int], *, timeout_s: float) -> Carrier:
    """Return a carrier over a group of its own. Collective."""
    group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    return Carrier(GlooTransport(group), timeout_s=timeout_s)
