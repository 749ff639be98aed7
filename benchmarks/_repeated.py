"""Repeat in minutes what the committed figures say: does this machine, and this source, agree?

Of each set-up whose speeds stay, the exact contestants race again, for as long as they need to
settle and two turns more; the figure is how many times `auto`'s steps theirs take. What is
simulated is repeated to the digit. Each result is kept as it is there, and is not made again for
the same source: a run that was broken off goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._common import Row
from benchmarks._evidence import ROOT, collect, commands_of, source_of
from benchmarks.arena._cells import Cell, cells_of, found_in
from benchmarks.arena._figures import standings
from benchmarks.arena._papers import SETUPS

NUM_SETTLED = 2  # turns
MOST_OFF = 0.1  # of a ratio of steps
MOST_OFF_SIMULATED = 1e-6


def rows(into: Path, evidence: Path) -> Iterator[Row]:
    """Yield a row for what is simulated, and one for each set-up that has a committed result.

    Args:
        into: folder for what is found now.
        evidence: folder of the committed results.
    """
    yield of_papers(into, evidence / "papers.json")
    for name in SETUPS:
        cell = cells_of(name, quick=False)[0]
        kept = evidence / "arena" / cell.file_name
        if name.endswith("static") and kept.exists():
            yield of_setup(cell, into / "arena", json.loads(kept.read_text("utf-8")))


def of_papers(into: Path, kept: Path) -> Row:
    """Compare all numbers of `benchmarks.papers`."""
    collect(commands_of(["papers"]), into, source_of(ROOT))
    now, before = (
        numbers_in(json.loads(path.read_text("utf-8"))["rows"]) for path in (into / kept.name, kept)
    )
    off = [abs(one - other) / max(abs(other), 1.0) for one, other in zip(now, before, strict=False)]
    same = len(now) == len(before)
    return Row(
        f"benchmarks.papers, simulated: {len(before)} figures",
        f"within {MOST_OFF_SIMULATED:g} of evidence/{kept.name}",
        {"most_off": max(off), "as_many": same},
        same and max(off) <= MOST_OFF_SIMULATED,
    )


def of_setup(cell: Cell, into: Path, kept: dict[str, Any]) -> Row:
    """Race again, in short, and compare the settled steps of each exact contestant."""
    num_turns = SETUPS[cell.setup].num_learning + NUM_SETTLED
    found = found_in(into, replace(cell, duration_s=num_turns * cell.turn_s))
    now, before = settled(found), settled(kept)
    both = {name: (now[name], before[name]) for name in before if name in now}
    return Row(
        f"{cell.setup}: steps over auto's, now and as committed",
        f"within {MOST_OFF:.0%}, for all {len(before)} exact contestants",
        both,
        now.keys() == before.keys()
        and all(abs(one / other - 1) <= MOST_OFF for one, other in both.values()),
    )


def settled(cell: dict[str, Any]) -> dict[str, float]:
    """Return how many times as long as ``auto``'s the settled steps of each contestant are."""
    return {one.name: one.settled.ratio for one in standings([cell]) if one.settled is not None}


def numbers_in(found: Any) -> list[float]:
    """Return all numbers of a result, in order; those of its words are left out."""
    if isinstance(found, dict):
        return [number for one in found.values() for number in numbers_in(one)]
    if isinstance(found, list):
        return [number for one in found for number in numbers_in(one)]
    return [float(found)] if isinstance(found, int | float) and not isinstance(found, bool) else []
