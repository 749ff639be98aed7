"""A cell under torchrun, which ends the other ranks by itself: whether it does, and leaves none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic

from benchmarks._common import environment
from benchmarks._fault_cells import RANKS, Cell
from benchmarks._fault_cluster import SCRIPT, Ended, Outcome, limit_s

PATIENCE_S = 35.0  # torchrun waits 30 s for who does not heed SIGTERM: one that was stopped cannot
_START_S = 120.0


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Start torchrun with a cell's ranks, and wait for its end.

    Returns:
        An outcome whose ``others`` is torchrun alone, as rank -1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={len(RANKS)}", "--monitor-interval=0.1", str(SCRIPT)]
    command += [str(folder), cell.point, cell.kind, str(cell.victim), cell.wrap]
    limit = limit_s(cell.kind) + PATIENCE_S
    with (folder / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
    try:
        code: int | None = process.wait(_START_S + limit)
    except subprocess.TimeoutExpired:
        code = None
        process.kill()
        process.wait()
    ended_s, struck = monotonic(), folder / "struck"
    began_s = float(struck.read_text()) if struck.exists() else ended_s
    seconds = None if code is None else ended_s - began_s
    said = (folder / "torchrun.log").read_text(errors="replace").strip().rpartition("\n")[2]
    ended = Ended(seconds, code, said=said[:300])
    return Outcome(limit, struck.exists(), {-1: ended}, False, _kill_the_rest(folder))


def problems_of(outcome: Outcome) -> tuple[str, ...]:
    """Return what is not as it should be."""
    end, found = outcome.others[-1], []
    if not outcome.struck:
        found.append("the fault never came")
    if end.seconds is None or end.seconds > outcome.limit_s:
        found.append("torchrun did not end in time")
    if end.code == 0:
        found.append("torchrun saw no failure")
    if outcome.remained:
        found.append(f"{outcome.remained} remained")
    return tuple(found)


def _kill_the_rest(folder: Path) -> int:
    """Kill the ranks that are there still; return how many."""
    count = 0
    for file in folder.glob("pid-*"):
        pid = int(file.read_text())
        with suppress(OSError):
            if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                count += 1
    return count
