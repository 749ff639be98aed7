"""Sends test bytes between ranks before the first step, to learn what links carry."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from ..._following._probed import Probed, ProbeRound, links_from_probes
from ..._following._probes import Probes
from ..._plans._bandwidths import Links
from ._transport import AbstractTransport, PeerFailed, Pending

_TAG = 1 << 29
PROBES = Probes()


def probe_links(
    transport: AbstractTransport,
    collect: Callable[[Any], list[Any]],
    *,
    probes: Probes = PROBES,
    clock: Callable[[], float] = monotonic,
) -> Links | None:
    """Return what the links carry; None if the budget did not suffice to know it of every rank.

    Collective, with nothing else under way. Each round begins on all ranks together, and all decide
    alike about the next one: by the times of all, and the longest that any has been at it.

    Args:
        transport: between all ranks.
        collect: returns the objects of all ranks on every rank, by rank.
        probes: which transfers, and how long.
        clock: monotonic seconds.

    Raises:
        PeerFailed: a rank is gone, or the transport was broken off. Nothing here looks at the
            time: who watches the ranks breaks it off.
    """
    began_s, size = clock(), transport.world_size
    done: list[Probed] = []
    elapsed_s, tag = 0.0, _TAG
    while (current := probes.next(size, done, elapsed_s)) is not None:
        collect(None)  # all are ready
        mine = _transfer(transport, current, tag, clock)
        tag += len(current.ways)
        seconds: dict[int, float] = {}
        for times, so_far_s in collect((mine, clock() - began_s)):
            seconds |= times
            elapsed_s = max(elapsed_s, so_far_s)
        done.append(Probed(current, tuple(seconds[way] for way in range(len(current.ways)))))
    return links_from_probes(size, probes.whole(done))


def _transfer(
    transport: AbstractTransport, probe: ProbeRound, tag: int, clock: Callable[[], float]
) -> dict[int, float]:
    """Make this rank's part of a round; return the seconds of what came here, by way."""
    payload = torch.empty(max(probe.num_bytes), dtype=torch.uint8)
    began_s = clock()
    receipts, sends, seconds = [], [], {}
    for way, (sender, receiver) in enumerate(probe.ways):
        if receiver == transport.rank:
            buffer = torch.empty(probe.num_bytes[way], dtype=torch.uint8)
            receipts.append((way, sender, transport.receive(buffer, sender, tag + way)))
    for way, (sender, receiver) in enumerate(probe.ways):
        if sender == transport.rank:
            sends.append(
                (receiver, transport.send(payload[: probe.num_bytes[way]], receiver, tag + way))
            )
    for way, sender, pending in receipts:
        _wait(pending, sender)
        seconds[way] = max(clock() - began_s, 1e-6)
    for receiver, pending in sends:
        _wait(pending, receiver)
    return seconds


def _wait(pending: Pending, peer: int) -> None:
    try:
        pending.wait()
    except RuntimeError as error:
        raise PeerFailed(peer, str(error)) from error
