"""Which link between hosts all ranks wait for, by the kernel's accounts of their connections."""

from __future__ import annotations

from enum import StrEnum
from itertools import chain, combinations
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from .._render import number, percent
from .._types import FloatArray, IntArray
from ._account import HostClues

_MOST_ENDS = 4096  # of a rank in a run: connections that are made again and again


class LinkLoads(NamedTuple):
    """What was carried from rank to rank, all ``(num_links,)``, where it is known of both ends.

    Attributes:
        sender, receiver: ranks.
        from_host, to_host: numbers of their hosts' addresses: those that are alike share a link.
        acked_bytes: that the receiver's end has got.
        bytes_per_s: while something was on its way; of several connections together.
        busy: part of the time in which something was.
        by_reader: part of that in which the receiver's end took nothing more.
        resent: part of all segments that were sent again.
    """

    sender: IntArray
    receiver: IntArray
    from_host: IntArray
    to_host: IntArray
    acked_bytes: FloatArray
    bytes_per_s: FloatArray
    busy: FloatArray
    by_reader: FloatArray
    resent: FloatArray


Ends = tuple[str, str]


@final
class LinkBooks:
    """Sums up what connections carried, over the newest seconds and the whole run.

    Args:
        world_size: number of ranks.
        window_s: how many seconds; between half of them and all are looked at.
    """

    def __init__(self, world_size: int, window_s: float) -> None:
        self._half_s = window_s / 2
        self._run, self._older, self._newer = (
            [dict[Ends, FloatArray]() for _ in range(world_size)] for _ in range(3)
        )
        self._lasted_s = np.zeros((3, world_size))

    def add(self, rank: int, clues: HostClues) -> None:
        """Take in one rank's look."""
        lasted_s = self._lasted_s
        if lasted_s[2, rank] >= self._half_s:
            self._older[rank], self._newer[rank] = self._newer[rank], {}
            lasted_s[1:, rank] = lasted_s[2, rank], 0.0
        lasted_s[[0, 2], rank] += clues.lasted_s
        for here, there, *counts in clues.links:
            for sums in (self._run[rank], self._newer[rank]):
                sums[here, there] = sums.get((here, there), 0.0) + np.array(counts, np.float64)
                if len(sums) > _MOST_ENDS:
                    del sums[next(iter(sums))]

    def links(self, *, whole_run: bool) -> LinkLoads:
        """Return what was seen. A connection of which one end alone is a rank's is left out."""
        ranks = range(len(self._run))
        parts = [self._run] if whole_run else [self._older, self._newer]
        lasted_s = self._lasted_s[0] if whole_run else self._lasted_s[1:].sum(axis=0)
        owner = {ends: rank for part in parts for rank in ranks for ends in part[rank]}
        sums: dict[Ends, FloatArray] = {}
        for part in parts:
            for known in part:
                for ends, counts in known.items():
                    sums[ends] = sums.get(ends, 0.0) + counts
        numbers: dict[str, int] = {}
        rows: dict[tuple[int, ...], list[FloatArray]] = {}
        for (here, there), counts in sums.items():
            if (other := owner.get((there, here))) is not None:
                hosts = (one.rpartition(":")[0] for one in (here, there))
                at = [numbers.setdefault(host, len(numbers)) for host in hosts]
                rows.setdefault((owner[here, there], other, *at), []).append(counts)
        sender, receiver, from_host, to_host = np.array(list(rows), np.int64).reshape(-1, 4).T
        # NCCL has several connections for one link, busy at the same time.
        busy_us = np.maximum([max(one[1] for one in row) for row in rows.values()], 1.0)
        whole = np.array([np.sum(row, axis=0) for row in rows.values()]).reshape(-1, 5).T
        return LinkLoads(
            sender,
            receiver,
            from_host,
            to_host,
            acked_bytes=whole[0],
            bytes_per_s=whole[0] / busy_us * 1e6,
            busy=busy_us / 1e6 / np.maximum(lasted_s[sender], 1e-9),
            by_reader=whole[2] / np.maximum(whole[1], 1.0),
            resent=whole[4] / np.maximum(whole[3], 1.0),
        )


class LinkFault(StrEnum):
    """What is slow about a link, as far as it shows."""

    EGRESS = "egress"
    """A host's way out: its sender sends slowly, to whomever."""
    INGRESS = "ingress"
    """A host's way in."""
    LINK = "link"
    """One of both, or what lies between them: only the slow pair of ranks is known."""
    LOSS = "loss"
    """Much has to be sent again."""
    READER = "reader"
    """The receiving process takes nothing more, on whatever link."""


class SlowLink(NamedTuple):
    """A link that all ranks wait for.

    Attributes:
        fault: what is slow about it.
        rank: whose link it is: the receiver's for ``INGRESS`` and ``READER``, else the sender's.
        peer: the rank at the other end.
        at: its number in ``LinkLoads``.
        hides: part of the waiting that would be left if no slower link hid this one, in (0, 1].
    """

    fault: LinkFault
    rank: int
    peer: int
    at: int
    hides: float


# Seen on 4 and 6 hosts behind token buckets of 200 Mbit/s, one of 40 (`benchmarks.links`): healthy
# links had 0.53 to 1 times the rate of the fastest.
_SLOW = 0.5  # times the fastest link
_SLOWER = 0.7  # times at least two others
_SLOW_READER = 0.8  # times these two, as the kernel says itself that the reader is slow
_ALIKE = 1.1  # times the slowest
_AS_SLOW = 1.4  # likewise: what is no faster has to be explained
_LOW = 0.55  # times the fastest: so may be what is not slow, but has to wait for what is
_ONE_END = 1.25  # times as fast are links that wait at the other end, at least
_MOST_SLOW = 8  # links that may be to blame themselves
_LEAST_PART = 0.1  # of the bytes of the link that carried most
_LEAST_BYTES = 1e6
_LEAST_BUSY = 0.5  # of the time in which all ranks wait
_BY_READER = 0.5  # of the time in which it was busy
_LOSSY = 0.05  # of all segments; a queue that overflows before a slow link drops 4 % of them


def slow_links(links: LinkLoads, waits: float) -> tuple[SlowLink, ...]:
    """Return which links all ranks wait for: the slowest first, two at most, mostly none.

    In an all-reduce around a ring, all links carry as much, at the pace of the slowest. That one
    is busy all the time, and the others rest: while they are busy, they are faster. So bytes over
    busy time distinguish them, and bytes over time do not.

    Which end of a slow link is to blame shows by other links of its hosts. All on a slow way out
    are slow; and links *into* that host are slower too, as their answers leave it behind the bytes
    that queue there. So with ways in, and answers to what that host sends. The fewest faults that
    explain all slow links are named. Where answers overtake bytes in a queue, a ring shows the pair
    alone.

    Right where one link or two carry half of what the fastest does, or less. Wrong where something
    else but ranks uses a link: it is named all the same. Nothing is found where more than two are
    as slow, nor on two hosts whose links are alike.

    Args:
        links: what was carried.
        waits: part of the time in which all ranks wait for what is exchanged.
    """
    rate, used = links.bytes_per_s, _used(links)
    if len(used) < 2:
        return ()
    first = used[0]
    second, fastest = rate[used[-2:]] if len(used) > 2 else rate[used[[-1, -1]]]
    most = min(_SLOW * fastest, _SLOWER * second)
    if links.by_reader[first] >= _BY_READER:
        most = _SLOW_READER * second
    if rate[first] > most or links.busy[first] < _LEAST_BUSY * waits:
        return ()
    start, end = links.from_host, links.to_host
    elsewhere = (start != start[first]) & (end != end[first])
    if (elsewhere & (rate <= _ALIKE * rate[first]))[used].sum() > 1:
        return ()
    return _named(_blamed(rate[used], start[used], end[used]), links, used)


def _used(links: LinkLoads) -> IntArray:
    """Return the links that carried their part, the slowest first."""
    most = links.acked_bytes.max(initial=0.0)
    used = np.flatnonzero(links.acked_bytes >= max(_LEAST_BYTES, _LEAST_PART * most))
    return used[np.argsort(links.bytes_per_s[used], kind="stable")]


class _Blame(NamedTuple):
    """What would be slow: the links ``on`` it, and ``behind`` it those that wait for them."""

    fault: LinkFault
    on: NDArray[np.bool_]
    behind: NDArray[np.bool_]


def _blamed(rate: FloatArray, start: IntArray, end: IntArray) -> tuple[_Blame, ...]:
    """Return the one or two faults that explain best which links are slow; none if none do.

    Args:
        rate: of the links that carried their part, the slowest first.
        start, end: their hosts.
    """
    low = rate <= _LOW * rate[-1]
    slow = (rate <= rate[0]) | (low & (rate <= _AS_SLOW * rate[0]))
    weight = 2.0 * slow + (low & ~slow)
    each = []
    for at in np.flatnonzero(slow)[:_MOST_SLOW]:
        this, back = np.arange(len(rate)) == at, (start == end[at]) & (end == start[at])
        each += [
            _Blame(LinkFault.LINK, this, back),
            _Blame(LinkFault.EGRESS, start == start[at], end == start[at]),
            _Blame(LinkFault.INGRESS, end == end[at], start == end[at]),
        ]
    alone = [
        1.5 + 2 * (on & ~slow).sum() + (fault is not LinkFault.LINK and not (behind & low).any())
        for fault, on, behind in each
    ]

    def cost(chosen: tuple[int, ...]) -> tuple[float, float]:
        known = np.any([each[at].on | each[at].behind for at in chosen], axis=0)
        named = np.any([each[at].on for at in chosen], axis=0)
        return sum(alone[at] for at in chosen) + weight[~known].sum(), rate[named].mean()

    numbers = range(len(each))
    chosen = chain(combinations(numbers, 1), combinations(numbers, 2))
    best = min((some for some in chosen if any(each[at].on[0] for at in some)), key=cost)
    found = tuple(each[at] for at in best)
    if len(found) == 1 and not _is_one_end(found[0], rate, start, end):
        found = (found[0]._replace(fault=LinkFault.LINK),)
    known = np.any([one.on | one.behind for one in found], axis=0)
    return found if known[slow].all() else ()


def _is_one_end(blame: _Blame, rate: FloatArray, start: IntArray, end: IntArray) -> bool:
    """Return whether it is this end of a single link, and not as well the other one."""
    at = int(np.argmax(blame.on))
    other = start == end[at] if blame.fault is LinkFault.EGRESS else end == start[at]
    behind = float(rate[blame.behind].min(initial=np.inf))
    return blame.on.sum() > 1 or float(rate[other].min(initial=np.inf)) >= _ONE_END * behind


def _named(blamed: tuple[_Blame, ...], links: LinkLoads, used: IntArray) -> tuple[SlowLink, ...]:
    """Return what is said of faults: the slowest link first, and each rank once."""
    found: dict[int, SlowLink] = {}
    for place, fault in sorted((int(np.argmax(one.on)), one.fault) for one in blamed):
        at = int(used[place])
        ends = int(links.sender[at]), int(links.receiver[at])
        if links.by_reader[at] >= _BY_READER:
            fault = LinkFault.READER
        elif links.resent[at] >= _LOSSY:
            fault = LinkFault.LOSS
        if fault in (LinkFault.INGRESS, LinkFault.READER):
            ends = ends[::-1]
        hides = float(links.bytes_per_s[used[0]] / links.bytes_per_s[at])
        found.setdefault(ends[0], SlowLink(fault, *ends, at, hides))
    return tuple(found.values())


_REMEDY = {
    LinkFault.EGRESS: "check its network card, cable and switch port, and what else it sends",
    LinkFault.INGRESS: "check its network card, cable and switch port, and what else it receives",
    LinkFault.LINK: "check the cards of both hosts and what lies between them",
    LinkFault.LOSS: "check cables, transceivers and switch ports between both",
    LinkFault.READER: "look at what keeps its process from receiving: the want of a core, or small "
    "receive buffers (`net.ipv4.tcp_rmem`)",
}
_WORTH = 0.9  # times an exchange around a ring: what is no shorter is not said


def said_of(slow: SlowLink, links: LinkLoads) -> tuple[str, str]:
    """Return what shows that a link is slow, and what to do."""
    mbit = links.bytes_per_s * 8e-6
    others = mbit[[at for at in _used(links) if at != slow.at]]
    own, peer = number(float(mbit[slow.at])), f"rank {slow.peer}"
    than = f"{own} Mbit/s where others {{}} {_range(others)}"
    resent = float(links.resent[slow.at])
    match slow.fault:
        case LinkFault.EGRESS:
            text = f"it sends at {than.format('send at')}"
        case LinkFault.INGRESS:
            text = f"it receives at {than.format('receive at')}"
        case LinkFault.READER:
            part = percent(float(links.by_reader[slow.at]))
            text = f"it could take nothing for {part} % of the time in which {peer} sent to it"
        case _:
            text = f"its link to {peer} carries {than.format('carry')}"
    if resent >= 0.01:
        text += f", and {percent(resent)} % of that is sent again"
    is_end = slow.fault in (LinkFault.EGRESS, LinkFault.INGRESS)
    least = _by_shares(links, float(mbit[slow.at]), float(others.max())) if is_end else 1.0
    by_shares = (
        "; with DDP over gloo, `Balancer(network=Network())` may shorten the exchange to "
        f"{percent(least)} %"
    )
    return text, _REMEDY[slow.fault] + by_shares * (least <= _WORTH)


def said_of_all(links: LinkLoads) -> str:
    """Return why no link is named, in words that continue a sentence."""
    if not len(used := _used(links)):
        return "; no TCP connections between hosts are seen, so no link can be named"
    mbit = _range(links.bytes_per_s[used] * 8e-6)
    return f"; no link is much slower than the others: {mbit} Mbit/s"


def _range(mbit: FloatArray) -> str:
    low, high = number(float(mbit.min())), number(float(mbit.max()))
    return low if low == high else f"{low} to {high}"


def _by_shares(links: LinkLoads, slow: float, usual: float) -> float:
    r"""Return the least part of a ring's time that an exchange by shares of the links takes.

    With one host of bandwidth $b$ and $N - 1$ of $B$: the bound $\max(1 / b, 2 (N - 1) / \sum b)$
    over the ring's $2 (N - 1) / (N b)$; 1 where it is no ring, as with such shares.
    """
    used = _used(links)
    number = len({*links.from_host[used].tolist(), *links.to_host[used].tolist()})
    if number != len(used):
        return 1.0
    twice = 2 * (number - 1)
    return number / twice * max(1.0, twice * slow / (slow + (number - 1) * usual))
