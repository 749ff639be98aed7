"""How many samples a step takes: said by the loader, by the user, or by both."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from ..exceptions import invalid


def agreed_batch_size(given: int | None, loader: DataLoader[Any], world_size: int) -> int:
    """Return the global batch, from the loader or as given where the two agree."""
    if loader.batch_size is None:
        return given or 1  # the balanced loader refuses such a loader, with the remedy
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


def check_tail(tail_size: int, world_size: int) -> None:
    """Raise if the short last step is too short for a model with local BatchNorm.

    It needs 2 samples on every rank, and a stand-in would enter its statistics.
    """
    if 0 < tail_size < 2 * world_size:
        raise invalid(
            "Balancer.prepare(loader)",
            f"have 2 samples for each of {world_size} ranks in its last step, for the model's "
            "BatchNorm",
            tail_size,
            "Set `DataLoader(drop_last=True)`, or use GroupNorm.",
        )
