"""Who the others wait for, and why, in words."""

from __future__ import annotations

from collections.abc import Sequence

from .._render._words import percent
from ..events import WaitingDiagnosed

_MOST_NAMED = 3


def named(event: WaitingDiagnosed, hosts: Sequence[str]) -> str:
    """Return the causes with their ranks, such as ``rank 3@node7: input 18 %``; or nothing.

    Args:
        event: what was found.
        hosts: host name of every rank; of none where they are not known.
    """
    found = zip(event.causes, event.ranks, event.lost_share, strict=True)
    return ", ".join(
        f"{_whose(rank, hosts)}{cause} {percent(share)} %"
        for cause, rank, share in list(found)[:_MOST_NAMED]
    )


def waiting_news(event: WaitingDiagnosed, hosts: Sequence[str]) -> str:
    """Return a line on causes that are new, with the evidence of the first; or nothing."""
    if not event.causes:
        return ""
    return (
        f"step {event.step}: ranks wait for others in {percent(event.waiting_share)} % of their "
        f"time. Lost by: {named(event, hosts)}. {_first_up(event.evidence[0])}. What to do: "
        f"{event.remedy[0]}"
    )


def _whose(rank: int, hosts: Sequence[str]) -> str:
    if rank < 0:
        return ""
    return f"rank {rank}@{hosts[rank]}: " if rank < len(hosts) else f"rank {rank}: "


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]
