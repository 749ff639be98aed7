"""Sends test bytes between ranks before the first step, to learn what links carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

import torch

from ...control import ProbeRound, Probes, links_from_probes
from ...sharding import Links
from ._transport import AbstractTransport, PeerFailed, Pending

_TAG = 1 << 29
PROBES = Probes(least_s=0.1, most_bytes=1 << 24)


def probe_links(
    transport: AbstractTransport,
    collect: Callable[[Any], list[Any]],
    *,
    probes: Probes = PROBES,
    clock: Callable[[], float] = monotonic,
) -> Links:
    """Return what the links carry. Collective, with nothing else under way.

    Each round begins on all ranks together, and is repeated with more bytes until it took long
    enough; the next begins with a size that did.

    Args:
        transport: between all ranks.
        collect: returns everybody's object on every rank, by rank.
        probes: which transfers, and how long.
        clock: monotonic seconds.

    Raises:
        PeerFailed: a rank is gone, or the transport was broken off. Nothing here looks at the
            time: who watches the ranks breaks it off.
    """
    done: list[tuple[ProbeRound, list[float]]] = []
    num_bytes, tag = probes.first_bytes, _TAG
    for planned in probes.rounds(transport.world_size):
        current: ProbeRound | None = replace(planned, num_bytes=num_bytes)
        while current is not None:
            collect(None)  # all are ready
            mine = _transfer(transport, current, tag, clock)
            tag += len(current.ways)
            everybody: dict[int, float] = {}
            for times in collect(mine):
                everybody |= times
            seconds = [everybody[way] for way in range(len(current.ways))]
            last, current = current, probes.again(current, seconds)
        done.append((last, seconds))
        num_bytes = max(probes.first_bytes, last.num_bytes // probes.growth)
    return links_from_probes(transport.world_size, done)


def _transfer(
    transport: AbstractTransport, probe: ProbeRound, tag: int, clock: Callable[[], float]
) -> dict[int, float]:
    """Make this rank's part of a round; return the seconds of what came here, by way."""
    payload = torch.empty(probe.num_bytes, dtype=torch.uint8)
    began_s = clock()
    receipts, sends, seconds = [], [], {}
    for way, (sender, receiver) in enumerate(probe.ways):
        if receiver == transport.rank:
            buffer = torch.empty_like(payload)
            receipts.append((way, sender, transport.receive(buffer, sender, tag + way)))
    for way, (sender, receiver) in enumerate(probe.ways):
        if sender == transport.rank:
            sends.append((receiver, transport.send(payload, receiver, tag + way)))
    transport.launch()
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
