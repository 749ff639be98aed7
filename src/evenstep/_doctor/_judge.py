"""What speeds, links and machines say together: times for advice, and all findings in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .._render import number, percent, seconds
from ..advice import advise
from ..advice._advice import RunTimes
from ..exceptions import invalid
from ._checkup_facts import Checkup, FoundAilment, LinkSpeed, Pace, RankFacts
from ._judge_machines import in_words, judge_machines, numbers


def usable(checkup: Checkup) -> tuple[Pace, ...]:
    """Return the paces that have times."""
    return tuple(pace for pace in checkup.paces if pace.seconds)


def run_times(checkup: Checkup) -> RunTimes:
    """Return what timed steps show, in the form that a recorded run has.

    Ranks without times are left out: workers are those of ``usable``, in this order.

    Raises:
        ValueError: no rank has times.
    """
    paces = usable(checkup)
    if not paces:
        remedy = "Run `evenstep doctor` again, and see its findings."
        raise invalid("Checkup(paces=...)", "hold the times of a rank", "none", remedy)
    ranks = tuple(pace.rank for pace in paces)
    num_steps = max(len(pace.seconds) for pace in paces)
    sizes = np.zeros((num_steps, len(paces)), np.int64)
    seconds = np.ones((num_steps, len(paces)))
    for at, pace in enumerate(paces):
        sizes[: len(pace.sizes), at] = pace.sizes
        seconds[: len(pace.seconds), at] = pace.seconds
    known = [checkup.of(rank) for rank in ranks]
    found = RunTimes.of(
        sizes,
        seconds,
        num_steps=num_steps,
        step_s=max(float(np.median(pace.seconds)) for pace in paces),
        global_batch_size=max(checkup.global_batch_size, len(paces)),
        ranks=ranks,
        names=tuple(f"{one.host} {one.device.name or one.device.kind}" for one in known),
        untimed=tuple(rank for rank in range(checkup.world_size) if rank not in ranks),
    )
    assert found is not None  # each has a step
    return found


NOISY = 0.25
"""Half of a rank's steps are further from their median than this part of it."""
SLOW_SHARE = 0.75
"""A rank below this part of the median speed of ranks with the same device is slow."""
THROTTLED_SHARE = 0.05


def judge_speeds(checkup: Checkup) -> Iterator[FoundAilment]:
    """Yield what timed steps show."""
    for pace in checkup.paces:
        yield from _of_pace(checkup, pace)
    yield from _slow_ranks(checkup)
    yield from _worth(checkup)


def spread_of(pace: Pace) -> float:
    """Return the median distance of steps from the median of their size, relative to that."""
    sizes, times = np.array(pace.sizes), np.array(pace.seconds)
    ratios = np.ones(len(times))
    for size in set(pace.sizes):
        chosen = sizes == size
        ratios[chosen] = times[chosen] / np.median(times[chosen])
    return float(np.median(abs(ratios - 1)))


def _of_pace(checkup: Checkup, pace: Pace) -> Iterator[FoundAilment]:
    name = checkup.of(pace.rank).name
    if pace.error:
        yield FoundAilment(
            "step-failed",
            (pace.rank,),
            f"{name} could not time {checkup.workload}: {pace.error}.",
            "Try it alone: `evenstep doctor` with the same `--step` on that host.",
        )
    if not pace.seconds:
        return
    if pace.throttled_share > THROTTLED_SHARE:
        yield FoundAilment(
            "quota-throttles",
            (pace.rank,),
            f"A CPU quota held {name} back for {percent(pace.throttled_share)} % of the time in "
            "which steps were timed.",
            "Raise the quota of its container, or give its samples to others: `Balancer` does.",
        )
    elif (spread := spread_of(pace)) > NOISY:
        yield FoundAilment(
            "speed-noisy",
            (pace.rank,),
            f"Steps of {name} take {percent(spread)} % more or less than their median.",
            "Look for other processes on its cores; the speeds here are rough.",
        )


def _slow_ranks(checkup: Checkup) -> Iterator[FoundAilment]:
    """Yield ranks that are slower than others with the same device."""
    paces = usable(checkup)
    if len(paces) < 3:
        return  # of two, it is unknown which is as it should be
    speed = {pace.rank: _speed(pace) for pace in paces}
    alike: dict[tuple[str, str], list[int]] = {}
    for pace in paces:
        device = checkup.of(pace.rank).device
        alike.setdefault((device.kind, device.name), []).append(pace.rank)
    noise = {pace.rank: spread_of(pace) for pace in paces}
    for ranks in (ranks for ranks in alike.values() if len(ranks) > 2):
        usual = float(np.median([speed[rank] for rank in ranks]))
        for rank in ranks:
            if speed[rank] < (SLOW_SHARE - noise[rank]) * usual:
                yield FoundAilment(
                    "rank-slow",
                    (rank,),
                    f"{checkup.of(rank).name} does {number(speed[rank])} samples/s, "
                    f"{number(usual)} is the median of {len(ranks)} ranks with the same device.",
                    "Look at its temperature, clock, power limit and neighbours; meanwhile "
                    "`Balancer` gives it fewer samples.",
                )


def _speed(pace: Pace) -> float:
    """Return samples per second at the larger of the two sizes, in the median."""
    sizes, times = np.array(pace.sizes), np.array(pace.seconds)
    return float(sizes.max() / np.median(times[sizes == sizes.max()]))


def _worth(checkup: Checkup) -> Iterator[FoundAilment]:
    if len(paces := usable(checkup)) < 2:
        return
    found = run_times(checkup)
    advice = advise(found.times, found.global_batch_size)
    for at, keep in enumerate(advice.worth_keeping):
        if not keep:
            yield FoundAilment(
                "not-worth-keeping",
                (paces[at].rank,),
                f"{checkup.of(paces[at].rank).name} needs longer for one sample than the others "
                f"for all {found.global_batch_size}: a step takes {seconds(advice.best.step_s)} "
                f"without it, {seconds(advice.balanced.step_s)} with it.",
                "Leave it out.",
            )


SLOW_LINK_SHARE = 0.5
"""A host's best link below this part of the other hosts' median is slow."""
SLOW_MBIT = 500.0
"""A link below this is slow whatever the others are: 100 MB of gradients take seconds."""
LONG_ROUND_TRIP_S = 0.005
_LOOPBACKS = ("lo", "lo0")


def judge_links(checkup: Checkup) -> Iterator[FoundAilment]:
    """Yield what is wrong with names, interfaces and links."""
    if len(checkup.machines) > 1:
        for facts in checkup.ranks:
            yield from _hostname(facts)
    for ranks in checkup.machines.values():
        yield from _interface(ranks[0], numbers(ranks))
    for link in checkup.links:
        if link.error:
            yield FoundAilment(
                "link-unreachable",
                (link.receiver, link.sender),
                f"{checkup.of(link.receiver).name} does not reach {checkup.of(link.sender).name} "
                f"at {checkup.of(link.sender).network.address}: {link.error}.",
                "Look at firewalls and routes between them, and at `GLOO_SOCKET_IFNAME`: workers "
                "connect to each other, at any port.",
            )
    yield from _slow_links(checkup)


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


def _hostname(facts: RankFacts) -> Iterator[FoundAilment]:
    chosen, resolved = facts.network.interface, facts.network.resolved
    if chosen in _LOOPBACKS:
        evidence = (
            f"`GLOO_SOCKET_IFNAME={chosen}` on {facts.name}, and gloo tells the other hosts the "
            "address of the loopback."
        )
        remedy = f"Set it{_suggested(facts) or ' to another interface'}, or unset it."
    elif not chosen and (not resolved or resolved.startswith("127.") or resolved == "::1"):
        evidence = (
            f"The name of {facts.host} resolves to {resolved or 'no address'} on {facts.name}, and "
            "gloo tells the other hosts that address."
        )
        remedy = "Write the host's own address into /etc/hosts, or set `GLOO_SOCKET_IFNAME`"
        remedy += f"{_suggested(facts)}."
    else:
        return
    yield FoundAilment("hostname-loopback", (facts.rank,), evidence, remedy)


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
            "interface-missing",
            ranks,
            f"`GLOO_SOCKET_IFNAME={chosen}` on {facts.host}, where no such interface is up with "
            "an address.",
            f"Set it to one of {', '.join(sorted(known)) or 'those that `ip addr` shows'}, or "
            "unset it.",
        )
        return
    fastest = max(known, key=lambda name: known[name])
    if 0 < known[chosen] <= SLOW_LINK_SHARE * known[fastest]:
        yield FoundAilment(
            "interface-slow",
            ranks,
            f"`GLOO_SOCKET_IFNAME={chosen}` on {facts.host} has {known[chosen]} Mbit/s, "
            f"{fastest} {known[fastest]}.",
            f"Set `GLOO_SOCKET_IFNAME={fastest}`, if the other hosts are reached by it.",
        )


def _slow_links(checkup: Checkup) -> Iterator[FoundAilment]:
    """Yield hosts whose own link is slow, and the worst pair that is far away."""
    by_host = host_mbit(checkup)
    for name, mbit in sorted(by_host.items(), key=lambda item: item[1]):
        others = [value for other, value in by_host.items() if other != name]
        usual = float(np.median(others)) if len(others) > 1 else mbit
        if mbit >= SLOW_MBIT and mbit >= SLOW_LINK_SHARE * usual:
            continue
        ranks = checkup.machines[name]
        is_behind = mbit < SLOW_LINK_SHARE * usual
        beside = f", those of the others {number(usual)} in the median" if is_behind else ""
        yield FoundAilment(
            "link-slow",
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
            "latency-high",
            (worst.receiver, worst.sender),
            f"A small message from {checkup.of(worst.receiver).name} to "
            f"{checkup.of(worst.sender).name} and back takes {seconds(worst.round_trip_s)}.",
            "Train within one site, or exchange seldom: each all-reduce waits for several of them.",
        )


MOST_ALIKE = 3


def judge(checkup: Checkup) -> tuple[FoundAilment, ...]:
    """Return what is wrong, or costs time; nothing where all is well.

    What is found more than three times with the same remedy is one finding, with the evidence of
    the first: a list of a hundred hosts is not read. That a quota holds a rank back is left out
    where the quota itself is named.
    """
    found = [*judge_machines(checkup), *judge_links(checkup), *judge_speeds(checkup)]
    named = [each.ranks for each in found if each.ailment == "quota-below-threads"]
    limited = {rank for ranks in named for rank in ranks}
    groups: dict[tuple[str, str], list[FoundAilment]] = {}
    for each in found:
        if each.ailment != "quota-throttles" or not limited.issuperset(each.ranks):
            groups.setdefault((each.ailment, each.remedy), []).append(each)
    merged: list[FoundAilment] = []
    for group in groups.values():
        merged += group if len(group) <= MOST_ALIKE else [_one(group)]
    return tuple(merged)


def _one(group: list[FoundAilment]) -> FoundAilment:
    first = group[0]
    ranks = tuple(sorted({rank for each in group for rank in each.ranks}))
    more = [rank for rank in ranks if rank not in first.ranks]
    alike = f"Likewise {in_words(more)}." if more else f"{len(group) - 1} more like this."
    return replace(first, ranks=ranks, evidence=f"{first.evidence} {alike}")
