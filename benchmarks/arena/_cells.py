"""Cells of the arena: which races there are, one JSON file for each, kept as it ends."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks._common import progress
from benchmarks._evidence import ROOT, source_of
from benchmarks.arena._papers import SETUPS
from benchmarks.arena._race import one_process, race
from benchmarks.arena.contestants import contestants
from evenstep.testing import run_workers

START_S = 120.0
"""What starting and ending the processes may take on a busy machine."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One race.

    Attributes:
        setup: name of the machines.
        name: of the only contestant, or "exact" for all exact ones in turns.
        seeds: one after the other; the exact ones are timed with the first.
        duration_s: seconds that each contestant trains.
        turn_s: seconds of a turn.
    """

    setup: str
    name: str
    seeds: tuple[int, ...]
    duration_s: float
    turn_s: float

    @property
    def entries(self) -> tuple[tuple[str, int], ...]:
        """Name and seed of each contestant."""
        if self.name != "exact":
            return tuple((self.name, seed) for seed in self.seeds)
        every = contestants(SETUPS[self.setup])
        return tuple((name, self.seeds[0]) for name, one in every.items() if one.is_exact)

    @property
    def file_name(self) -> str:
        """Of its JSON."""
        return f"{self.setup}.{self.name}.json"


def cells_of(setup: str, *, quick: bool) -> list[Cell]:
    """Return the cells of a set-up, that of the exact contestants first; in short but one more."""
    full = SETUPS[setup]
    whole = (range(5), full.duration_s, full.turn_s)
    seeds, duration_s, turn_s = (range(1), 6.0, 2.0) if quick else whole
    names = [name for name, one in contestants(full).items() if not one.is_exact]
    names = [name for name in names if name == "asp"] if quick else names
    cells = [Cell(setup, "exact", tuple(seeds), duration_s, turn_s)]
    return cells + [Cell(setup, name, tuple(seeds), duration_s, duration_s) for name in names]


def found_in(folder: Path, cell: Cell) -> dict[str, Any]:
    """Return what a cell found, from its file, or by a race where there is none."""
    path = folder / cell.file_name
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text("utf-8"))
        wanted = json.loads(json.dumps(asdict(cell)))
        if kept["cell"] == wanted and kept["source"] == _source():
            progress(f"{cell.file_name}: kept")
            return kept
    progress(f"{cell.file_name}: {len(cell.entries)} x {cell.duration_s:g} s")
    found = _run(cell)
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(_lines(found), "utf-8")
    os.replace(partial, path)
    progress(f"{cell.file_name}: done")
    return found


def _run(cell: Cell) -> dict[str, Any]:
    setup, began_s = SETUPS[cell.setup], monotonic()
    num_servers = max(contestants(setup)[name].num_servers for name, _ in cell.entries)
    raced = run_workers(
        setup.world_size + num_servers,
        race,
        cell.setup,
        cell.entries,
        cell.duration_s,
        cell.turn_s,
        timeout_s=START_S + 2 * len(cell.entries) * cell.duration_s,
    )[0]
    names = [{"name": name, "seed": seed} for name, seed in cell.entries]
    found = {
        "cell": asdict(cell),
        "source": _source(),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"python": platform.python_version(), "cores": os.cpu_count()},
        "seconds": round(monotonic() - began_s, 1),
        "entries": [{**name, **one} for name, one in zip(names, raced, strict=True)],
    }
    if cell.name == "exact":
        num_steps = max(len(one["updates_s"]) for one in raced)
        found["one_process"] = {
            str(seed): one_process(cell.setup, seed, num_steps) for seed in cell.seeds
        }
    return found


def _source() -> str | None:
    """Return git's names of the source; None where it is not committed."""
    try:
        return source_of(ROOT)
    except SystemExit:
        return None


def _lines(found: dict[str, Any]) -> str:
    """Return JSON with a line for each value of an entry, so that a change can be read."""
    text = json.dumps(found)
    for key in ('"entries": ', '{"name": ', '"accuracy": ', '"updates_s": ', '"one_process": '):
        text = text.replace(key, "\n" + key)
    return text + "\n"
