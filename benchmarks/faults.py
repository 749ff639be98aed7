"""One rank of three fails, in every way at every place: how the others end, and whom they name.

Real processes over gloo, in a script as people write it (`benchmarks/_fault_script.py`). In the
covering set every place meets every way to fail, every rank and both wrappers; more cells are
drawn by ``--seed``. The others have to end within the deadline and 5 s (where a rank hangs but
lives: within ``hang_s`` and 5 s), name the rank that failed, and run the script's ``finally``.
torchrun, which ends the others by itself, has to come to its end and leave no process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from benchmarks import _fault_torchrun
from benchmarks._common import Row, main, progress
from benchmarks._fault_cells import KINDS, Cell, covering, drawn, under_torchrun
from benchmarks._fault_cluster import limit_s, problems_of, run_cell

NUM_DRAWN = 20
TORCHRUN = "under torchrun"
QUICK = 7  # one of so many cells; no divisor of their number, so that all kinds are among them
Found = dict[str, Any]


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Run what is missing, and answer for each way to fail, for cells drawn, and for torchrun."""
    groups = groups_of(options)
    cells = [cell for group in groups.values() for cell in group]
    with ExitStack() as stack:
        folder = options.resume or Path(stack.enter_context(TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        found = run_all(sorted(cells, key=lambda cell: cell.kind == "hang"), folder, options)
    for name, group in groups.items():
        yield row(name, [found[cell] for cell in group])
    for cell in cells:
        if found[cell]["problems"]:
            progress(f"NOT MET  {line(found[cell])}")


def groups_of(options: argparse.Namespace) -> dict[str, list[Cell]]:
    """Return the cells that are asked for, by the row that sums them up."""
    covered, beside = covering(), drawn(NUM_DRAWN, seed=options.seed)
    torchrun = under_torchrun()
    if options.quick:
        covered, beside, torchrun = covered[::QUICK], beside[:1], []
    groups = {
        f"covering set, {kind}": [cell for cell in covered if cell.kind == kind] for kind in KINDS
    }
    groups |= {f"drawn by seed {options.seed}": beside, TORCHRUN: torchrun}
    asked = {
        name: [cell for cell in group if options.only in str(cell)]
        for name, group in groups.items()
    }
    return {name: group for name, group in asked.items() if group}


def run_all(cells: list[Cell], folder: Path, options: argparse.Namespace) -> dict[Cell, Found]:
    """Return what was found in each cell, in this run or in one before that had this folder."""
    found = {}
    for cell in cells:
        if (path := folder / f"{cell.file_name}.json").exists():
            found[cell] = json.loads(path.read_text())
    missing = [cell for cell in cells if cell not in found]
    if found:
        progress(f"{len(found)} of {len(cells)} cells were run before")
    began_s = monotonic()
    with ThreadPoolExecutor(options.at_once) as pool:
        running = {pool.submit(run_one, cell, folder): cell for cell in missing}
        try:
            for number, future in enumerate(as_completed(running), start=1):
                cell = running[future]
                found[cell] = future.result()
                left_s = (monotonic() - began_s) / number * (len(missing) - number)
                words = line(found[cell])
                progress(f"{number} of {len(missing)}, {left_s / 60:.0f} min left: {words}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # those under way come to their end
            raise
    return found


def run_one(cell: Cell, folder: Path) -> Found:
    """Run a cell and keep what was found; the ranks' words only where something is not met."""
    words, began_s = folder / cell.file_name, monotonic()
    shutil.rmtree(words, ignore_errors=True)  # of a run that was broken off
    if cell.torchrun:
        outcome = _fault_torchrun.run_cell(cell, words)
        problems = _fault_torchrun.problems_of(outcome)
    else:
        outcome = run_cell(cell, words)
        problems = problems_of(cell, outcome)
    found: Found = {
        "cell": str(cell),
        **asdict(outcome),
        "slowest_s": outcome.slowest_s,
        "problems": problems,
        "wall_s": monotonic() - began_s,
        "load": os.getloadavg()[0],
    }
    if not found["problems"]:
        shutil.rmtree(words)
    partial = folder / f"{cell.file_name}.partial"
    partial.write_text(json.dumps(found, indent=1))
    partial.rename(folder / f"{cell.file_name}.json")
    return found


def line(found: Found) -> str:
    """Return a cell's outcome in words."""
    slowest_s = found["slowest_s"]
    ended = "" if slowest_s is None else f", others ended after {slowest_s:.1f} s"
    words = "; ".join(found["problems"]) or "met"
    return f"{found['cell']}: {words}{ended} (load {found['load']:.0f})"


def row(name: str, found: list[Found]) -> Row:
    """Sum up some cells."""
    ends_s = [one["slowest_s"] for one in found if one["slowest_s"] is not None]
    missed = [one for one in found if one["problems"]]
    measured = {
        "met": len(found) - len(missed),
        "median_s": median(ends_s) if ends_s else None,
        "slowest_s": max(ends_s, default=None),
        "remained": sum(one["remained"] for one in found),
        "wall_s": sum(one["wall_s"] for one in found),
        "missed": [line(one) for one in missed],
    }
    bar = f"it ends within {limit_s('kill') + _fault_torchrun.PATIENCE_S:g} s; 0 remain"
    if name != TORCHRUN:
        others = [end for one in found for end in one["others"].values()]
        cleaned_s = [end["cleaned_s"] for end in others if end["cleaned_s"] is not None]
        measured["finally_ran"] = f"{len(cleaned_s)} of {len(others)}"
        measured["finally_slowest_s"] = max(cleaned_s, default=None)
        bar = (
            f"all others end within {limit_s('kill'):g} s (of one that hangs {limit_s('hang'):g}), "
            "name the rank, run `finally`; 0 remain"
        )
    return Row(f"{name}: {len(found)} cells", bar, measured, met=not missed)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add which cells, and where they are kept."""
    parser.add_argument("--seed", type=int, default=0, help="draws cells beside the covering set")
    parser.add_argument("--only", default="", help="cells with this in their name alone")
    parser.add_argument("--at-once", type=int, default=2, help="cells that run side by side")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="keeps each cell that was run, and runs the others; a new one for new code",
    )


if __name__ == "__main__":
    main(__doc__, rows, add_options)
