"""Starts the processes of a cell, sees how each of them ends, and judges that."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from benchmarks._common import ROOT, environment
from benchmarks._fault_cells import RANKS, Cell
from benchmarks._fault_script import RUNTIME

SCRIPT = ROOT / "benchmarks" / "_fault_script.py"
MARGIN_S = 5.0  # beside the deadline
_START_S = 120.0  # until the fault, on a busy machine
_PATIENCE_S = 4.0  # past the limit, to tell what comes late from what never does
_VICTIM_S = 10.0  # for a victim that hangs and is interrupted, after the others
_STACKS_S = 0.5
_POLL_S = 0.02
_PORTS = range(20_000, 30_000)  # below those that Linux hands out by itself
Processes = dict[int, subprocess.Popen[bytes]]
_NAMED = re.compile(r"Rank (\d+)(?: on [^\n]*?)? was lost|on rank (\d+), |raised on rank (\d+)\b")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended that was not the victim.

    Attributes:
        seconds: from the fault; None if it did not end.
        code: its exit code.
        named: the ranks that it blames.
        cleaned_s: from the fault until its ``finally`` ran; None if that did not.
        said: its last line.
    """

    seconds: float | None = None
    code: int | None = None
    named: tuple[int, ...] = ()
    cleaned_s: float | None = None
    said: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell.

    Attributes:
        limit_s: from the fault, within which all others have to end.
        struck: whether the fault came at all.
        others: how they ended, by rank.
        cleaned: whether the victim's ``finally`` ran.
        remained: processes that had to be killed, without a victim that need not end.
    """

    limit_s: float
    struck: bool
    others: dict[int, Ended]
    cleaned: bool
    remained: int

    @property
    def slowest_s(self) -> float | None:
        """Seconds until all others had ended; None if they did not."""
        ends = [end.seconds for end in self.others.values()]
        return None if None in ends else max(s for s in ends if s is not None)


def limit_s(kind: str, point: str = "") -> float:
    """Return the seconds within which the others have to end.

    Before a rank has come to ``prepare``, there is no connection whose silence could be noticed.
    """
    assert RUNTIME.hang_s is not None
    by_hang = kind == "hang" or point == "prepare"
    return MARGIN_S + (RUNTIME.hang_s if by_hang else RUNTIME.deadline_s)


def problems_of(cell: Cell, outcome: Outcome) -> tuple[str, ...]:
    """Return what an outcome lacks, in words.

    At the end of a run nobody needs the others any more: who has done everything by then may end
    well, and has nobody to blame.
    """
    if not outcome.struck:
        return ("the fault never came",)
    found = [
        f"rank {rank}{problem}"
        for rank, end in sorted(outcome.others.items())
        for problem in _problems_of_rank(cell, end, outcome.limit_s)
    ]
    if cell.kind != "kill" and cell.victim_ends and not outcome.cleaned:
        found.append("the victim: no `finally`")
    if outcome.remained:
        found.append(f"{outcome.remained} remained")
    return tuple(found)


def _problems_of_rank(cell: Cell, end: Ended, limit_s: float) -> list[str]:
    found = []
    if end.seconds is None:
        found.append(" did not end")
    elif end.seconds > limit_s:
        found.append(" ended late")
    finished = end.code == 0 and cell.point == "end of run"
    if end.seconds is not None and end.named != (cell.victim,) and not finished:
        found.append(f" blames {', '.join(map(str, end.named)) or 'nobody'}")
    if end.cleaned_s is None:
        found.append(": no `finally`")
    return found


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Start three processes, wait for the fault and for what follows, and leave none behind.

    Args:
        cell: who fails, where and how.
        folder: where each rank's words go, and the stacks of those that do not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = _start(cell, folder)
    try:
        return _watched(cell, folder, processes)
    finally:
        for process in processes.values():
            _end(process)


def _start(cell: Cell, folder: Path) -> Processes:
    port = free_port()
    where = [str(folder), cell.point, cell.kind, str(cell.victim), cell.wrap]
    processes = {}
    for rank in RANKS:
        env = environment() | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(RANKS)),
            "LOCAL_WORLD_SIZE": str(len(RANKS)),
        }
        with (folder / f"{rank}.log").open("wb") as log:
            processes[rank] = subprocess.Popen(
                [sys.executable, str(SCRIPT), *where],
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that whatever it starts can be found and ended
            )
    return processes


def free_port() -> int:
    """Return a port that no connection is given by chance before it is listened to."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError(f"No port of {_PORTS.start} to {_PORTS.stop - 1} is free on this machine.")


def _watched(cell: Cell, folder: Path, processes: Processes) -> Outcome:
    """Wait until all is over, or will never be, and look what there is to see."""
    struck = folder / "struck"
    others = {rank: process for rank, process in processes.items() if rank != cell.victim}
    ends_s: dict[int, float] = {}

    def all_ended() -> bool:
        for rank, process in others.items():
            if rank not in ends_s and process.poll() is not None:
                ends_s[rank] = monotonic()
        return len(ends_s) == len(others)

    limit = limit_s(cell.kind, cell.point)
    _wait(lambda: struck.exists() or all_ended(), monotonic() + _START_S)
    came = struck.exists()
    began_s = float(struck.read_text()) if came else monotonic()
    if came:
        _wait(all_ended, began_s + limit + _PATIENCE_S)
    stuck = [process for rank, process in others.items() if rank not in ends_s]
    for process in stuck:
        process.send_signal(signal.SIGUSR1)  # say where you are
    if stuck:
        sleep(_STACKS_S)
    ended = {
        rank: _ended(folder, rank, process.poll(), ends_s.get(rank), began_s)
        for rank, process in others.items()
    }
    remained = len(stuck) + _left(cell, processes)
    return Outcome(limit, came, ended, (folder / f"finally-{cell.victim}").exists(), remained)


def _ended(folder: Path, rank: int, code: int | None, end_s: float | None, began_s: float) -> Ended:
    """Return how a rank ended, by what it left in the folder."""
    text, done = (folder / f"{rank}.log").read_text(errors="replace"), folder / f"finally-{rank}"
    return Ended(
        seconds=None if end_s is None else end_s - began_s,
        code=code,
        named=tuple(sorted({int("".join(groups)) for groups in _NAMED.findall(text)})),
        cleaned_s=float(done.read_text()) - began_s if done.exists() else None,
        said=text.strip().rpartition("\n")[2][:300],
    )


def _left(cell: Cell, processes: Processes) -> int:
    """Return how many processes remain of the victim, and of what the others have started.

    One that hangs is interrupted by evenstep.
    """
    victim = processes[cell.victim]
    if cell.victim_ends:
        _wait(lambda: victim.poll() is not None, monotonic() + _VICTIM_S)
    ended = [
        process
        for process in processes.values()
        if process.poll() is not None and _is_alive(process.pid)
    ]
    return len(ended) + (cell.victim_ends and victim.poll() is None)


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(done: Callable[[], bool], until_s: float) -> None:
    while not done() and monotonic() < until_s:
        sleep(_POLL_S)
