"""Which link between hosts all ranks wait for, by the kernel's accounts of their connections."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from .._render._words import number, percent
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
_SLOW_READER = 0.8  # times all of these, as the kernel says itself that the reader is slow
_AS_SLOW = 1.4  # times the slowest: what is no faster is slow on its own account
_ALIKE = 1.1  # likewise, of a link that has a host in common with it; of others, one may be alike
_SECOND = 0.7  # times the fastest that is left
_AFFECTED = 0.55  # likewise: a link whose answers have to wait where the slow one's bytes queue
_UNAFFECTED = 1.25  # times as fast is the link on the other side then
_LEAST_PART = 0.1  # of the bytes of the link that carried most
_LEAST_BYTES = 1e6
_LEAST_BUSY = 0.5  # of the time in which all ranks wait
_BY_READER = 0.5  # of the time in which it was busy
_LOSSY = 0.05  # of all segments; a queue that overflows before a slow link drops 4 % of them


def slow_links(links: LinkLoads, waits: float) -> tuple[SlowLink, ...]:
    """Return which links all ranks wait for: the slowest first, two at most, mostly none.

    In an all-reduce around a ring, all links carry as much, at the pace of the slowest. That one
    is busy all the time, and the others rest: while they are busy, they are faster. So bytes over
    busy time tell them apart, and bytes over time do not.

    Where a host has several links out, and all are slow, its way out is; so with ways in. A ring
    has one of each. Then it shows by the answers: they leave a host behind the bytes that queue on
    its slow way out, so the link *into* that host is slower as well; answers to what a host sends
    come in on its slow way in. If neither shows, as where answers overtake bytes in the queue, only
    the pair is known.

    Right where one link or two carry half of what the fastest does, or less. Wrong where something
    else but ranks uses a link: it is named all the same. Nothing is found where more than two are
    as slow, nor on two hosts whose links are alike.

    Args:
        links: what was carried.
        waits: part of the time in which all ranks wait for what is exchanged.
    """
    rate, order = links.bytes_per_s, _used(links)
    if len(order) < 2:
        return ()
    first, *others = order
    *_, second, fastest = rate[[others[0], *others][-2:]]
    most = min(_SLOW * fastest, _SLOWER * second)
    if links.by_reader[first] >= _BY_READER:
        most = _SLOW_READER * second
    if rate[first] > most or links.busy[first] < _LEAST_BUSY * waits:
        return ()
    start, end = links.from_host, links.to_host
    is_alike = rate <= _ALIKE * rate[first]
    is_far = (start != start[first]) & (end != end[first])
    if (is_alike & is_far)[others].sum() > 1:
        return ()
    is_beside = (end == start[first]) | (start == end[first])
    as_slow = is_alike | (~is_beside & (rate <= _AS_SLOW * rate[first]))
    slow = [at for at in order if as_slow[at]]
    found = [_named(links, first, order, slow)]
    for at in slow[1:]:
        named = _named(links, at, order, slow)
        if named.rank != found[0].rank and rate[at] <= _SECOND * fastest:
            return (*found, named._replace(hides=float(rate[first] / rate[at])))
    return tuple(found)


def _used(links: LinkLoads) -> list[int]:
    """Return the links that carried their part, the slowest first."""
    most = links.acked_bytes.max(initial=0.0)
    used = np.flatnonzero(links.acked_bytes >= max(_LEAST_BYTES, _LEAST_PART * most))
    return [int(at) for at in used[np.argsort(links.bytes_per_s[used], kind="stable")]]


def _named(links: LinkLoads, at: int, used: list[int], slow: list[int]) -> SlowLink:
    """Return what is slow about a link."""
    fault = _fault(links, at, used, slow)
    ends = int(links.sender[at]), int(links.receiver[at])
    if fault in (LinkFault.INGRESS, LinkFault.READER):
        ends = ends[::-1]
    return SlowLink(fault, *ends, at, 1.0)


def _fault(links: LinkLoads, at: int, used: list[int], slow: list[int]) -> LinkFault:
    if links.by_reader[at] >= _BY_READER:
        return LinkFault.READER
    if links.resent[at] >= _LOSSY:
        return LinkFault.LOSS
    here, there = links.from_host[at], links.to_host[at]
    for hosts, fault in ((links.from_host, LinkFault.EGRESS), (links.to_host, LinkFault.INGRESS)):
        beside = [one for one in used if hosts[one] == hosts[at] and one != at]
        if beside and all(one in slow for one in beside):
            return fault
    rest = [one for one in used if links.bytes_per_s[one] > _ALIKE * links.bytes_per_s[at]]
    before = _slowest(links, rest, links.to_host == here, links.from_host != there)
    after = _slowest(links, rest, links.from_host == there, links.to_host != here)
    least = _AFFECTED * links.bytes_per_s[rest].max(initial=0.0)
    if before <= least and after >= _UNAFFECTED * before:
        return LinkFault.EGRESS
    if after <= least and before >= _UNAFFECTED * after:
        return LinkFault.INGRESS
    return LinkFault.LINK


def _slowest(links: LinkLoads, rest: list[int], *which: NDArray[np.bool_]) -> float:
    """Return the rate of the slowest link of some; infinite where there is none."""
    return float(links.bytes_per_s[rest][np.all(which, axis=0)[rest]].min(initial=np.inf))


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
            text = f"what {peer} sends it could take nothing of for {part} % of the time of sending"
        case _:
            text = f"its link to {peer} carries {than.format('carry')}"
    if resent >= 0.01:
        text += f", and {percent(resent)} % of that is sent again"
    remedy = _REMEDY[slow.fault]
    num_hosts = len(set(links.from_host.tolist()) | set(links.to_host.tolist()))
    least = _by_shares(num_hosts, float(mbit[slow.at]), float(others.max()))
    if slow.fault in (LinkFault.EGRESS, LinkFault.INGRESS) and least <= _WORTH:
        remedy += (
            "; with DDP over gloo, `Balancer(network=Network())` may shorten the exchange to "
            f"{percent(least)} %"
        )
    return text, remedy


def said_of_all(links: LinkLoads) -> str:
    """Return why no link is named, in words that continue a sentence."""
    if not (used := _used(links)):
        return "; no TCP connections between hosts are seen, so no link can be named"
    mbit = _range(links.bytes_per_s[used] * 8e-6)
    return f"; no link is much slower than the others: {mbit} Mbit/s"


def _range(mbit: FloatArray) -> str:
    low, high = number(float(mbit.min())), number(float(mbit.max()))
    return low if low == high else f"{low} to {high}"


def _by_shares(num_hosts: int, slow: float, usual: float) -> float:
    r"""Return the least part of a ring's time that an exchange by shares of the links takes.

    With one host of bandwidth $b$ and $N - 1$ of $B$: the bound $\max(1 / b, 2 (N - 1) / \sum b)$
    over the ring's $2 (N - 1) / (N b)$.
    """
    twice = 2 * (num_hosts - 1)
    return num_hosts / twice * max(1.0, twice * slow / (slow + (num_hosts - 1) * usual))
