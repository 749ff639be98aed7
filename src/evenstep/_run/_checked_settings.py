"""What balancers of every framework are made with, checked at once."""

from __future__ import annotations

from typing import Any, Literal

from ..exceptions import invalid
from ..policies import AbstractPolicy, by_name
from ..policies._base import check_policy


def checked_policy(policy: Any) -> AbstractPolicy[Any]:
    """Return the policy, or the one of that name."""
    if isinstance(policy, str):
        return by_name(policy)
    check_policy("Balancer(policy=...)", policy, rule="be a name, 'module:Class', or a policy")
    return policy  # type: ignore[no-any-return]


def checked_reduction(loss_reduction: Any) -> Literal["mean", "sum"]:
    """Return what the loss does over the units of a forward, if it is one of the two."""
    if loss_reduction not in ("mean", "sum"):
        raise invalid(
            "Balancer(loss_reduction=...)",
            'be "mean" or "sum"',
            repr(loss_reduction),
            "Say what the loss does over the samples of a batch.",
        )
    return loss_reduction  # type: ignore[no-any-return]
