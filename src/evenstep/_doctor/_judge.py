"""All findings on a checkup, in the order of their causes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ._checkup_facts import Checkup
from ._findings import Ailment, FoundAilment
from ._judge_links import judge_links
from ._judge_machines import in_words, judge_machines
from ._judge_speeds import judge_speeds

MOST_ALIKE = 3


def judge(checkup: Checkup) -> tuple[FoundAilment, ...]:
    """Return what is wrong, or costs time; nothing where all is well.

    What is found more than three times with the same remedy is one finding, with the evidence of
    the first: a list of a hundred hosts is not read.
    """
    found = (*judge_machines(checkup), *judge_links(checkup), *judge_speeds(checkup))
    return _merged(_without_doubles(found))


def _without_doubles(found: Iterable[FoundAilment]) -> list[FoundAilment]:
    """Leave out that a quota holds a rank back, where the quota itself is named."""
    found = list(found)
    named = [each.ranks for each in found if each.ailment is Ailment.QUOTA_BELOW_THREADS]
    held = {rank for ranks in named for rank in ranks}
    return [
        each
        for each in found
        if each.ailment is not Ailment.QUOTA_THROTTLES or not held.issuperset(each.ranks)
    ]


def _merged(found: Iterable[FoundAilment]) -> tuple[FoundAilment, ...]:
    groups: dict[tuple[Ailment, str], list[FoundAilment]] = {}
    for each in found:
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
