"""What balancers of every framework are made with, checked at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from .exceptions import invalid
from .policies import AbstractPolicy, by_name
from .policies._base import check_policy


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


def checked_ports(ports: Any) -> Sequence[int]:
    """Return the ports that rank 0 may listen at; 0 alone is any.

    Args:
        ports: a number, a range, or None for any.

    Raises:
        ValueError: it is of another type, or a number is not a port.
    """
    if ports is None:
        return (0,)
    wanted = range(ports, ports + 1) if type(ports) is int else ports
    if not (isinstance(wanted, range) and wanted and min(wanted) >= 1 and max(wanted) <= 65535):
        raise invalid(
            "Runtime(ports=...)",
            "be a port from 1 to 65535, a `range` of them, or None",
            repr(ports),
            "Give `29600` or `range(29600, 29700)`; None takes any port that is free.",
        )
    return wanted


def check_watch(
    *, heartbeat_s: float, deadline_s: float, hang_s: float | None, line_every: int | None
) -> None:
    """Raise unless a run can be watched so.

    Raises:
        ValueError: a number is out of range.
    """
    if not 0 < heartbeat_s <= deadline_s / 3:
        raise invalid(
            "Runtime(heartbeat_s=...)",
            f"be positive and at most a third of deadline_s, {deadline_s / 3:g}",
            heartbeat_s,
            "Raise `deadline_s`, or lower it.",
        )
    if hang_s is not None and not hang_s >= 3 * heartbeat_s:
        raise invalid(
            "Runtime(hang_s=...)",
            f"be at least three times heartbeat_s, {3 * heartbeat_s:g}, or None",
            hang_s,
            "Give more than the longest step.",
        )
    if line_every is not None and line_every < 1:
        raise invalid(
            "Runtime(line_every=...)",
            "be at least 1, or None",
            line_every,
            "Use None for no line at all.",
        )
