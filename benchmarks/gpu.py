"""What evenstep does on an accelerator, in one JSON file that you can send to the project.

Every cell runs in a process of its own with a time limit; its result, or its error, is in the file
as soon as it ends. With ``--resume FILE`` a run that was broken off goes on. Without an
accelerator all of it runs on the CPU, in small sizes, which shows that the code works.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks._cells import Command, Found, run_cell, run_cells
from benchmarks._common import Row, main, progress
from benchmarks._gpu_cell import CELLS, MACHINE, NO_BAR

SCHEMA = "evenstep.gpu"
VERSION = 1


def command(name: str, device: str, *, quick: bool) -> Command:
    """Return what runs a cell, or ``MACHINE``, in a process of its own."""
    words = [sys.executable, "-m", "benchmarks._gpu_cell", name, "--device", device]
    return Command([*words, "--quick"] if quick else words, 120.0 if name == MACHINE else 1800.0)


def header(device: str, *, quick: bool) -> dict[str, Any]:
    """Return what the file says beside the cells.

    Raises:
        SystemExit: torch does not work here, or sees no such device.
    """
    progress("what this machine is")
    machine = run_cell(command(MACHINE, device, quick=quick))
    if machine["status"] != "done":
        sys.exit(machine["error"])
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "machine": machine["result"],
        "quick": quick or machine["result"]["device"] == "cpu",
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmarks.gpu", *map(_without_folder, sys.argv[1:])],
    }


def _without_folder(word: str) -> str:
    """Return a word of a command; of a path only the name, for others to read."""
    return Path(word).name if "/" in word else word


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Run the cells that are asked for, and tell of each."""
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = options.resume or Path(f"runs/gpu-{now}.json")
    names = options.only or list(CELLS)
    commands = {name: command(name, options.device, quick=options.quick) for name in names}
    progress(f"results go to {path}")
    told = header(options.device, quick=options.quick)
    yield Row(MACHINE, NO_BAR, told["machine"])
    for name, found in run_cells(commands, path, told):
        yield row(name, found)
    progress(f"all of it is in {path}")


def row(name: str, found: Found) -> Row:
    """Return the line on a cell."""
    if found["status"] == "failed":
        return Row(name, CELLS[name].bar, {"error": found["error"].strip()[-300:]}, met=False)
    if found["status"] == "not run":
        return Row(name, CELLS[name].bar, {"not run": found["reason"]})
    result = found["result"]
    return Row(name, CELLS[name].bar, result["headline"], met=result.get("met"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add which device, which cells, and where they are kept."""
    parser.add_argument("--device", default="auto", help="cpu, cuda, xpu; what there is by default")
    parser.add_argument("--only", nargs="+", choices=CELLS, metavar="CELL", help=", ".join(CELLS))
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keeps what is in it already")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
