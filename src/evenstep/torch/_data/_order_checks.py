"""Which loaders can be given one order for all ranks."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ...exceptions import invalid
from ._global_batches import has_own_batches


def check_order(loader: DataLoader[Any], world_size: int, *, batches: bool) -> None:
    """Raise unless ``loader`` can be given a global order.

    Args:
        loader: the user's.
        world_size: number of ranks.
        batches: whether it may have a ``batch_sampler``.
    """
    where = "BalancedLoader(loader=...)"
    if isinstance(loader.dataset, IterableDataset):
        raise invalid(
            where,
            "have a data set that is addressed by index",
            f"the IterableDataset {type(loader.dataset).__name__}",
            "Prepare it with `balancer.prepare(model, loader, stream=...)`, which says what each "
            "rank reads of it.",
        )
    if loader.batch_size is None and not (batches and has_own_batches(loader)):
        got = "a custom batch_sampler" if has_own_batches(loader) else "batch_size=None"
        raise invalid(
            where,
            "leave it to evenstep which samples make a batch",
            got,
            "Use `DataLoader(batch_size=..., sampler=...)`.",
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise invalid(
            where,
            "be a DataLoader that iterates as torch's does",
            type(loader).__name__,
            "Give the DataLoader inside it, before another library prepared it.",
        )
    _check_sampler(loader.sampler, world_size)
    if not batches and not hasattr(loader.sampler, "__len__"):
        raise invalid(
            "DataLoader(sampler=...)",
            "have a length",
            type(loader.sampler).__name__,
            "Give it a `__len__` that returns how many indices it yields an epoch.",
        )


def _check_sampler(sampler: object, world_size: int) -> None:
    if isinstance(sampler, DistributedSampler):
        if type(sampler).__iter__ is not DistributedSampler.__iter__:
            raise invalid(
                "DataLoader(sampler=...)",
                "yield the order of the whole data set",
                f"{type(sampler).__name__}, a DistributedSampler of its own kind",
                "Give a sampler that does not shard: evenstep does.",
            )
        if sampler.num_replicas != world_size:
            raise invalid(
                "DistributedSampler(num_replicas=...)",
                f"be the {world_size} ranks that are balanced",
                sampler.num_replicas,
                "Leave the sampler out and use `DataLoader(shuffle=True)`.",
            )
