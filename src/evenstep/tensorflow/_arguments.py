"""What a balancer is made with, checked at once."""

from __future__ import annotations

from typing import Any, Literal

from ..control import Bounds
from ..exceptions import invalid
from ..policies import AbstractPolicy, by_name


def checked_size(global_batch_size: Any, world_size: int) -> int:
    """Return the global batch size, if every worker gets a sample."""
    if type(global_batch_size) is not int or global_batch_size < world_size:
        raise invalid(
            "Balancer(global_batch_size=...)",
            f"be a whole number of at least {world_size}, one sample for each worker",
            repr(global_batch_size),
            "Give the samples of a step over all workers.",
        )
    return global_batch_size


def checked_policy(policy: Any) -> AbstractPolicy[Any]:
    """Return the policy, or the one of that name."""
    policy = by_name(policy) if isinstance(policy, str) else policy
    if not isinstance(policy, AbstractPolicy):
        raise invalid(
            "Balancer(policy=...)",
            "be a name, `module:Class`, or a policy",
            repr(policy),
            "Give an instance, such as `Auto()`, not the class.",
        )
    return policy


def checked_reduction(loss_reduction: Any) -> Literal["mean", "sum"]:
    """Return what the loss does over the samples of a batch, if it is one of the two."""
    if loss_reduction not in ("mean", "sum"):
        raise invalid(
            "Balancer(loss_reduction=...)",
            'be "mean" or "sum"',
            repr(loss_reduction),
            "Say what the loss does over the samples of a batch.",
        )
    return loss_reduction  # type: ignore[no-any-return]


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
