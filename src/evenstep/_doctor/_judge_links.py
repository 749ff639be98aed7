"""Whether hosts reach each other, and which link is slow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .._render._words import number, seconds
from ._checkup_facts import Checkup, LinkSpeed, RankFacts
from ._findings import Ailment, FoundAilment
from ._judge_machines import numbers

SLOW_SHARE = 0.5
"""A host's best link below this part of the other hosts' median is slow."""
SLOW_MBIT = 500.0
"""A link below this is slow whatever the others are: 100 MB of gradients take seconds."""
LONG_ROUND_TRIP_S = 0.005
_LOOPBACKS = ("lo", "lo0")


def judge_links(checkup: Checkup) -> Iterator[FoundAilment]:
    """Yield what is wrong with names, interfaces and links."""
    if len(checkup.machines) > 1:
        for facts in checkup.ranks:
            yield from _name(facts)
    for ranks in checkup.machines.values():
        yield from _interface(ranks[0], numbers(ranks))
    for link in checkup.links:
        if link.error:
            yield FoundAilment(
                Ailment.LINK_UNREACHABLE,
                (link.receiver, link.sender),
                f"{checkup.of(link.receiver).name} does not reach {checkup.of(link.sender).name} "
                f"at {checkup.of(link.sender).network.address}: {link.error}.",
                "Look at firewalls and routes between them, and at `GLOO_SOCKET_IFNAME`: workers "
                "connect to each other, at any port.",
            )
    yield from _slow(checkup)


def between_hosts(checkup: Checkup) -> list[LinkSpeed]:
    """Return links that worked and leave a machine."""
    machine = {facts.rank: facts.machine for facts in checkup.ranks}
    return [
        link
        for link in checkup.links
        if not link.error and machine[link.receiver] != machine[link.sender]
    ]


def host_mbit(checkup: Checkup) -> dict[str, float]:
    """Return what each machine's link carries, in Mbit/s: the best it had, in its worse direction.

    A pair is as slow as the slower of its links, so the best peer shows the own one.
    """
    machine = {facts.rank: facts.machine for facts in checkup.ranks}
    found: dict[str, float] = {}
    for name in checkup.machines:
        best = {"in": 0.0, "out": 0.0}
        for link in between_hosts(checkup):
            if machine[link.receiver] == name:
                best["in"] = max(best["in"], link.mbit)
            if machine[link.sender] == name:
                best["out"] = max(best["out"], link.mbit)
        if measured := [value for value in best.values() if value]:
            found[name] = min(measured)
    return found


def _name(facts: RankFacts) -> Iterator[FoundAilment]:
    network = facts.network
    if network.interface in _LOOPBACKS:
        yield FoundAilment(
            Ailment.HOSTNAME_LOOPBACK,
            (facts.rank,),
            f"`GLOO_SOCKET_IFNAME={network.interface}` on {facts.name}, and gloo tells the other "
            "hosts the address of the loopback.",
            f"Set it{_suggested(facts) or ' to another interface'}, or unset it.",
        )
    if network.interface:
        return
    if not network.resolved or network.resolved.startswith("127.") or network.resolved == "::1":
        to = f"to {network.resolved}" if network.resolved else "to no address"
        yield FoundAilment(
            Ailment.HOSTNAME_LOOPBACK,
            (facts.rank,),
            f"The name of {facts.host} resolves {to} on {facts.name}, and gloo tells the other "
            "hosts that address.",
            f"Write the host's own address into /etc/hosts, or set `GLOO_SOCKET_IFNAME`"
            f"{_suggested(facts)}.",
        )


def _suggested(facts: RankFacts) -> str:
    known = facts.network.interfaces or {}
    fastest = max(known, key=lambda name: known[name], default="")
    return f" to {fastest}" if fastest and known[fastest] else ""


def _interface(facts: RankFacts, ranks: tuple[int, ...]) -> Iterator[FoundAilment]:
    chosen, known = facts.network.interface, facts.network.interfaces
    if not chosen or known is None or chosen in _LOOPBACKS:
        return
    if chosen not in known:
        yield FoundAilment(
            Ailment.INTERFACE_MISSING,
            ranks,
            f"`GLOO_SOCKET_IFNAME={chosen}` on {facts.host}, where no such interface is up with "
            "an address.",
            f"Set it to one of {', '.join(sorted(known)) or 'those that `ip addr` shows'}, or "
            "unset it.",
        )
        return
    fastest = max(known, key=lambda name: known[name])
    if 0 < known[chosen] <= SLOW_SHARE * known[fastest]:
        yield FoundAilment(
            Ailment.INTERFACE_SLOW,
            ranks,
            f"`GLOO_SOCKET_IFNAME={chosen}` on {facts.host} has {known[chosen]} Mbit/s, "
            f"{fastest} {known[fastest]}.",
            f"Set `GLOO_SOCKET_IFNAME={fastest}`, if the other hosts are reached by it.",
        )


def _slow(checkup: Checkup) -> Iterator[FoundAilment]:
    """Yield hosts whose own link is slow, and the worst pair that is far away."""
    by_host = host_mbit(checkup)
    for name, mbit in sorted(by_host.items(), key=lambda item: item[1]):
        others = [value for other, value in by_host.items() if other != name]
        usual = float(np.median(others)) if len(others) > 1 else mbit
        if mbit >= SLOW_MBIT and mbit >= SLOW_SHARE * usual:
            continue
        ranks = checkup.machines[name]
        is_behind = mbit < SLOW_SHARE * usual
        beside = f", those of the others {number(usual)} in the median" if is_behind else ""
        yield FoundAilment(
            Ailment.LINK_SLOW,
            numbers(ranks),
            f"The link of {ranks[0].host} carries {number(mbit)} Mbit/s{beside}: 100 MB of "
            f"gradients take {seconds(800 / mbit)} one way.",
            "Look at its cable, port and interface; else `network=` lets it sum less, and "
            "`evenstep plan --model-mb` says what that brings.",
        )
    far = [link for link in between_hosts(checkup) if link.round_trip_s > LONG_ROUND_TRIP_S]
    if far:
        worst = max(far, key=lambda link: link.round_trip_s)
        yield FoundAilment(
            Ailment.LATENCY_HIGH,
            (worst.receiver, worst.sender),
            f"A small message from {checkup.of(worst.receiver).name} to "
            f"{checkup.of(worst.sender).name} and back takes {seconds(worst.round_trip_s)}.",
            "Train within one site, or exchange seldom: each all-reduce waits for several of them.",
        )
