"""What a balancer is made with, checked at once."""

from __future__ import annotations

from typing import Any

from .._planner import Bounds
from ..exceptions import invalid


def checked_size(global_batch_size: Any, world_size: int) -> int:
    """Return the global batch size, if every worker gets a sample."""
    if type(global_batch_size) is not int or global_batch_size < world_size:
        raise invalid(
            "Balancer(global_batch_size=...)",
            f"be a whole number of at least {world_size}, one sample for each worker",
            repr(global_batch_size),
            "Give the samples of a step over all workers; a policy goes by its name, "
            "`Balancer(policy=...)`.",
        )
    return global_batch_size


def checked_bounds(bounds: Bounds) -> Bounds:
    """Return the bounds, if they can be kept here."""
    if bounds.vary != "size" or bounds.max == "probe":
        raise invalid(
            "Balancer(bounds=...)",
            "vary sizes, up to limits that are given",
            bounds,
            "Forwards of one size and limits found by trial are there for PyTorch alone.",
        )
    return bounds
