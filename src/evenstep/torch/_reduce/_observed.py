"""What one rank's receipts say of the ways to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ._watched import HEAD_BYTES, Arrival


class Way(NamedTuple):
    """All that one rank got of another in one exchange, as `Transfers.from_rows` takes it.

    Attributes:
        sender, receiver: ranks of the reducing group.
        num_bytes: that arrived.
        seconds: for how long any of it was under way.
    """

    sender: int
    receiver: int
    num_bytes: int
    seconds: float


def ways_to(receiver: int, arrivals: Iterable[Arrival]) -> list[Way]:
    """Return what each rank sent to ``receiver``, and for how long any of it was under way."""
    spans: dict[int, list[tuple[float, float]]] = {}
    num_bytes: dict[int, int] = {}
    for one in arrivals:
        spans.setdefault(one.peer, []).append((one.begin_s, one.end_s))
        num_bytes[one.peer] = num_bytes.get(one.peer, 0) + one.num_bytes - HEAD_BYTES
    return [Way(peer, receiver, num_bytes[peer], covered_s(spans[peer])) for peer in sorted(spans)]


def covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, each from its beginning to its end."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > until:
            covered += end - max(begin, until)
            until = end
    return covered
