"""What one rank's receipts say of the ways to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ....exceptions import invalid
from ._watched import HEAD_BYTES, Arrival

Span = tuple[float, float]


class Way(NamedTuple):
    """All that one rank got of another in one exchange, as `Transfers.from_rows` takes it.

    Attributes:
        sender, receiver: ranks of the reducing group; the same for all that one rank got.
        num_bytes: that arrived, but for those that only mark a beginning.
        seconds: what they took of the links between the two, or of that one rank's.
    """

    sender: int
    receiver: int
    num_bytes: int
    seconds: float


def ways_to(receiver: int, arrivals: Iterable[Arrival], *, burst_bytes: int = 1 << 14) -> list[Way]:
    r"""Return what each rank sent to ``receiver``, and what that took of the links between them.

    The time in which any of it was under way, each moment once, and of every pause $p$ before a
    part of it as much as a shaped link may save up: of a token bucket that was idle,
    ``burst_bytes`` pass at once, shared by the $m$ senders, so $\min(p, \beta T / n)$ with
    $\beta$ the burst over $m$, $n$ the bytes and $T$ the very answer.

    Right where parts are several times as long as the burst. A link without bursts, but with
    pauses, looks slower than it is by at most $\beta$ over the bytes of a part; one whose parts
    are no longer than $\beta$ counts with all pauses, so that it carries no more than it was
    asked for.

    A way that was used while others of the same link paused had more of it than its share, and the
    rates of all add up to more than the link carries: to several times as much, where parts are
    short and come one after the other. So the last way is that of the rank to itself: all that
    came, and the time in which anything did, pauses counted likewise.

    Args:
        receiver: this rank.
        arrivals: of one exchange, as ``WatchedTransport.take_arrivals`` has them.
        burst_bytes: what links may let through at once, at least 0. Rather too little: a link that
            looks faster than it is will be used, and be seen as it is, and one that looks slower
            will not.

    Raises:
        ValueError: ``burst_bytes`` is negative.
    """
    if burst_bytes < 0:
        raise invalid("ways_to(burst_bytes=...)", "be at least 0", burst_bytes, "Use 16384.")
    spans: defaultdict[int, list[Span]] = defaultdict(list)
    num_bytes: defaultdict[int, int] = defaultdict(int)
    for one in arrivals:
        spans[one.peer].append((one.begin_s, one.end_s))
        num_bytes[one.peer] += one.num_bytes - HEAD_BYTES
    burst = burst_bytes / max(len(spans), 1)
    ways = [
        Way(peer, receiver, num_bytes[peer], _taken_s(spans[peer], burst / num_bytes[peer]))
        for peer in sorted(spans)
    ]
    if ways:
        total, every = sum(num_bytes.values()), [span for each in spans.values() for span in each]
        ways.append(Way(receiver, receiver, total, _taken_s(every, burst_bytes / total)))
    return ways


def lasted_s(arrivals: Sequence[Arrival]) -> float:
    """Return the seconds from the first bytes that came to the last; 0 if nothing did."""
    if not arrivals:
        return 0.0
    return max(one.end_s for one in arrivals) - min(one.begin_s for one in arrivals)


def covered(spans: Iterable[Span]) -> tuple[float, list[float]]:
    """Return the length of the union of intervals, and those of the pauses in it."""
    seconds, pauses, until = 0.0, list[float](), None
    for begin, end in sorted(spans):
        if until is None:
            until = begin
        if begin > until:
            pauses.append(begin - until)
        seconds += max(end - max(begin, until), 0.0)
        until = max(end, until)
    return seconds, pauses


def _taken_s(spans: Sequence[Span], part: float) -> float:
    """Return the largest $T$ that is the union plus ``min(pause, part * T)`` of each pause."""
    seconds, pauses = covered(spans)
    taken_s = seconds + sum(pauses)
    pauses.sort()
    # Pauses at most part * T count whole, the longer ones as that: tried from all whole down.
    for whole in range(len(pauses), -1, -1):
        cut = len(pauses) - whole
        if cut * part >= 1:
            break
        taken_s = (seconds + sum(pauses[:whole])) / (1 - cut * part)
        if not whole or pauses[whole - 1] <= part * taken_s:
            break
    return taken_s
