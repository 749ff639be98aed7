"""Run the benchmarks that take hours, and keep what each found: `python -m benchmarks._evidence`.

A result is `evidence/NAME.json`: what the benchmark printed with ``--json``, its exit status, its
seconds, and the source it is of, as git names the trees of ``src`` and ``benchmarks``. A result of
the source at hand is not made again, so a run that was broken off goes on where it was. Results
are committed. A change under ``tests`` or ``docs`` makes none of them old.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from benchmarks._common import ROOT, progress

LONG: Mapping[str, tuple[str, ...]] = {
    "mutants": (),
    "regret": (),
    "papers": (),
    "parity": (),
    "gpu": (),
    "faults": ("--resume", "runs/evidence-of-faults"),
    "arena": ("--jobs", "3", "--resume", "evidence/arena"),
    "first_hour": (),
    "servers": (),
    "network": (),
}
"""Every benchmark of evidence with its options, those that take longest last."""


def collect(commands: Mapping[str, list[str]], folder: Path, source: str) -> list[str]:
    """Run each command whose result for ``source`` is not in ``folder``, and keep what it found.

    Args:
        commands: by name; each prints one JSON object and ends with 0, or with 1 where a bar is
            missed.
        folder: for the results, one file each. It is made where it is missing.
        source: what the results are of.

    Returns:
        Names whose result misses a bar, and names without one because the command broke down.
    """
    folder.mkdir(parents=True, exist_ok=True)
    short = []
    for name, command in commands.items():
        path = folder / f"{name}.json"
        if path.exists() and json.loads(path.read_text("utf-8"))["source"] == source:
            progress(f"{name}: {path} is of this source")
        else:
            progress(f"{name}: {' '.join(command)}")
            _keep(path, command, source)
        if not path.exists() or json.loads(path.read_text("utf-8"))["status"]:
            short.append(name)
    return short


def _keep(path: Path, command: list[str], source: str) -> None:
    """Write what a command found; a command that broke down leaves no file."""
    began_s = monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    path.unlink(missing_ok=True)  # of another source
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        progress(f"{path.stem} broke down with status {done.returncode}; see above")
        return
    kept = {
        "source": source,
        "command": command[1:],  # whatever Python it was
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(monotonic() - began_s, 1),
        "status": done.returncode,
        **found,
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    os.replace(partial, path)


def source_of(root: Path) -> str:
    """Return the names that git has for ``src`` and ``benchmarks``; refuse what it does not have.

    Raises:
        SystemExit: either of them has changes that are not committed.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=root, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()

    if changed := git("status", "--porcelain", "src", "benchmarks"):
        sys.exit(f"Evidence is of a commit. Commit these first:\n{changed}")
    return " ".join(git("rev-parse", "HEAD:src", "HEAD:benchmarks").split())


def commands_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the command of each benchmark."""
    return {
        name: [sys.executable, "-m", f"benchmarks.{name}", "--json", *LONG[name]] for name in names
    }


def main() -> None:
    """Run all, and end with 1 where a result is missing or misses a bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=LONG, default=list(LONG), help="these alone")
    options = parser.parse_args()
    source = source_of(ROOT)
    chosen = [name for name in LONG if name in options.only]
    short = collect(commands_of(chosen), ROOT / "evidence", source)
    if short:
        print(f"missing, or short of a bar: {', '.join(short)}")
    sys.exit(bool(short))


if __name__ == "__main__":
    main()
