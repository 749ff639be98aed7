"""A checkup in words and tables, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._render import counted, number, paragraph, percent, printable, seconds, text_table
from ..advice import advise
from ._checkup_facts import Checkup, FoundAilment
from ._judge import between_hosts, run_times, spread_of, usable

MOST_IN_MATRIX = 8
"""Ranks that measured links; past them, the slowest links are listed instead."""

LITTLE = 0.03
"""What balancing saves below this is nothing to speak of."""


def as_text(checkup: Checkup, findings: Sequence[FoundAilment], width: int | None = None) -> str:
    """Return all that is to be said, for a terminal of ``width`` columns or of any."""
    hosts = len({facts.machine for facts in checkup.ranks})
    first = checkup.ranks[0].versions if checkup.ranks else {}
    said = ", ".join(f"{name} {version}" for name, version in first.items())
    count = f"{counted(checkup.world_size, 'rank')} on {counted(hosts, 'host')}"
    head = f"evenstep doctor: {count}; {said}"
    found = [f"{each.ailment}: {each.evidence} {each.remedy}" for each in findings]
    verdict = f"{counted(len(found), 'finding')}:"
    if not found:
        verdict = "Nothing is misconfigured, as far as this can see."
    texts = (head, *_waste(checkup), verdict, *found)
    first_one, *others = (paragraph(printable(text), width) for text in texts)
    return "\n\n".join([first_one, _ranks(checkup, width), *_links(checkup, width), *others])


def _ranks(checkup: Checkup, width: int | None) -> str:
    rows = []
    for facts in checkup.ranks:
        cpu, device = facts.cpu, facts.device.name or facts.device.kind
        quota = "-" if cpu.quota_cores is None else f"{cpu.quota_cores:.3g}"
        row = [str(facts.rank), printable(facts.host), printable(device)]
        rows.append([*row, str(len(cpu.affinity)), quota, str(cpu.num_threads)])
    paces = usable(checkup)
    speeds: dict[int, list[str]] = {}
    if paces:
        found = run_times(checkup)
        for at, pace in enumerate(paces):
            slope_s = float(found.times.slope_s[at])
            error = max(1, round(100 * min(float(found.speed_error[at]), 1.0)))
            speed = f"{number(1 / slope_s)} ± {error} %" if slope_s else "-"
            fixed = seconds(float(found.times.intercept_s[at]))
            speeds[pace.rank] = [speed, fixed, f"{percent(spread_of(pace))} %"]
    for facts, row in zip(checkup.ranks, rows, strict=True):
        row += speeds.get(facts.rank, ["-", "-", "-"])
    head = ["rank", "host", "device", "cores", "quota", "threads", "samples/s", "fixed", "spread"]
    return text_table(head, rows, left=3, width=width)


def _links(checkup: Checkup, width: int | None) -> list[str]:
    good = [link for link in checkup.links if not link.error]
    ends = sorted({rank for link in good for rank in (link.receiver, link.sender)})
    if not ends:
        return []
    by_pair = {(link.receiver, link.sender): link for link in good}
    if len(ends) <= MOST_IN_MATRIX:
        rows = []
        for receiver in ends:
            row = [f"to rank {receiver}"]
            for sender in ends:
                link = by_pair.get((receiver, sender))
                cell = "" if link is None else f"{number(link.mbit)}, {seconds(link.round_trip_s)}"
                row.append(cell)
            rows.append(row)
        head = ["Mbit/s, round trip", *(f"from {rank}" for rank in ends)]
        return [text_table(head, rows, width=width)]
    slowest = sorted(between_hosts(checkup) or good, key=lambda link: link.mbit)[:MOST_IN_MATRIX]
    rows = [
        [f"{link.sender} to {link.receiver}", number(link.mbit), seconds(link.round_trip_s)]
        for link in slowest
    ]
    usual = number(float(np.median([link.mbit for link in good])))
    skipped = f"; no time for {checkup.skipped_pairs} pairs" if checkup.skipped_pairs else ""
    text = f"{len(good)} links measured, {usual} Mbit/s in the median{skipped}. The slowest:"
    return [
        paragraph(text, width),
        text_table(["link", "Mbit/s", "round trip"], rows, width=width),
    ]


def _waste(checkup: Checkup) -> list[str]:
    if len(usable(checkup)) < 2:
        return []
    found = run_times(checkup)
    advice = advise(found.times, found.global_batch_size)
    equal_s, balanced_s = advice.equal.step_s, advice.balanced.step_s
    error = 2 * float(found.time_error.max())
    text = (
        f"A step of {found.global_batch_size} samples ({checkup.workload}, exchange not counted): "
        f"{seconds(equal_s)} with equal shares, {seconds(balanced_s)} balanced"
    )
    saved = 1 - balanced_s / equal_s
    if saved < LITTLE:
        return [f"{text}. Balancing gains nothing to speak of."]
    if saved < error:
        return [f"{text}. The times are known to {percent(error)} % only, so both may be equal."]
    return [f"{text}. Plain training wastes {percent(saved)} % of its time on waiting."]
