"""How many samples a step takes: said by the loader, by the user, or by both."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from ...control import Bounds
from ...exceptions import invalid
from ._global_batches import has_own_batches


def agreed_batch_size(given: int | None, loader: DataLoader[Any], world_size: int) -> int:
    """Return the global batch, from the loader or as given where the two agree."""
    if loader.batch_size is None:
        if given is None and has_own_batches(loader):
            raise invalid(
                "Balancer(global_batch_size=...)",
                "be given with a `batch_sampler`, whose batches are then the global ones",
                None,
                "Name their size, over all workers.",
            )
        return given or 1  # the balanced loader refuses what is left, with the remedy
    implied = loader.batch_size * world_size
    if given is None:
        return implied
    if given < world_size:
        raise invalid(
            "Balancer(global_batch_size=...)",
            f"be at least the number of workers, {world_size}",
            given,
            "Raise it, or train on fewer workers.",
        )
    if loader.batch_size not in (given // world_size, -(-given // world_size)):
        raise invalid(
            "Balancer(global_batch_size=...)",
            f"agree with `DataLoader(batch_size={loader.batch_size})` on {world_size} workers, "
            f"which makes {implied}",
            given,
            f"Give the loader `batch_size={-(-given // world_size)}`, or leave "
            f"`global_batch_size` out.",
        )
    return given


def check_tail(tail_size: int, world_size: int, bounds: Bounds) -> None:
    """Raise if the short last step is too short for a model with local BatchNorm.

    It needs 2 samples on every rank, and a stand-in would enter its statistics. Where every
    forward has the same number, it needs one whole forward on every rank, and no single sample
    in one.
    """
    fixed = bounds.forward_size if bounds.vary == "count" else None
    each = max(2, fixed or 2)
    lonely = fixed is not None and tail_size % fixed == 1
    if 0 < tail_size < each * world_size or (tail_size and lonely):
        raise invalid(
            "Balancer.prepare(loader)",
            f"have {each} samples for each of {world_size} ranks in its last step, and none by "
            "itself, for the model's BatchNorm",
            tail_size,
            "Set `DataLoader(drop_last=True)`, or use GroupNorm.",
        )
