"""Start a command under a watch, or this very process: an environment, and nothing else."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from .._types import check_range
from ..exceptions import invalid

SITE = Path(__file__).parent / "_site"
SETTINGS = "EVENSTEP_WATCH"  # the settings, as JSON: read in every process
PROCESS = "EVENSTEP_WATCH_PROCESS"  # the number of the process to be observed itself
SUMMARY = "summary.txt"
SEEN = "seen"
ALONE = "evenstep watch: one process: nothing to wait for."
_UNSEEN = (
    "evenstep watch: no process on this machine opened a process group: nothing was watched here."
)


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How a run is watched.

    Attributes:
        every_s: seconds between two lines on the standard error of rank 0; 0 writes none.
        run_dir: folder for rank 0's ``events.jsonl``; empty writes none.
        launcher_dir: folder in which the ranks on its machine report to the launcher that a group
            was opened, and rank 0 the summary so far; empty where no launcher waits for the end.
    """

    every_s: float = 10.0
    run_dir: str = ""
    launcher_dir: str = ""


def environment(settings: WatchSettings, before: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is watched, and of all that it starts."""
    paths = [str(SITE), *filter(None, [before.get("PYTHONPATH")])]
    return {
        **before,
        "PYTHONPATH": os.pathsep.join(paths),
        SETTINGS: json.dumps(asdict(settings)),
    }


def run(command: Sequence[str], *, every_s: float, run_dir: str) -> int:
    """Run a command under a watch, and return its exit status as a shell has it.

    Ctrl-C reaches the command by the terminal; other signals to end are passed on. What the
    command could not say at its end, as where it was killed, is said here.

    Raises:
        ValueError: there is no such command, or ``every_s`` is no time.
    """
    settings = _settings(every_s, run_dir)
    with TemporaryDirectory(prefix="evenstep-watch-") as folder:
        settings = replace(settings, launcher_dir=folder)
        child = _started(command, environment(settings, os.environ))
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        before = {number: signal.getsignal(number) for number in numbers}
        try:
            for number in before:
                signal.signal(number, lambda received, _: _pass_on(child, received))
            status = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        _say_the_rest(Path(folder), ended_well=status == 0)
    return status if status >= 0 else 128 - status


def become(script: Sequence[str], *, every_s: float, run_dir: str) -> NoReturn:
    """Become the Python that runs a script under a watch: the process keeps its number.

    For a process that a cluster's manager started and sends its signals to.

    Raises:
        ValueError: ``every_s`` is no time.
    """
    settings = _settings(every_s, run_dir)
    found = environment(settings, os.environ) | {PROCESS: str(os.getpid())}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *script], found)


def main(arguments: Sequence[str]) -> NoReturn:
    """Read a command line: ``[options] -- command`` or ``[options] script.py``."""
    parser = argparse.ArgumentParser(
        prog="python -m evenstep.watch",
        description="Say which ranks of a training wait for which, and why. The script does not "
        "change.",
        usage="%(prog)s [--every S] [--run-dir DIR] (-- COMMAND ... | [-m] SCRIPT ...)",
    )
    parser.add_argument(
        "--every",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds between two lines; 0 writes none",
    )
    parser.add_argument(
        "--run-dir", default="", metavar="DIR", help="folder for rank 0's events.jsonl"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT ...")
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    known = parser.parse_args(given[:cut])
    options = {"every_s": known.every, "run_dir": known.run_dir}
    if not known.command and not given[cut + 1 :]:
        parser.error("name a command after --, or a script")
    try:
        if known.command:  # the script's own arguments may hold a -- as well
            module = ["-m"] if known.is_module else []
            become([*module, *known.command, *given[cut:]], **options)
        sys.exit(run(given[cut + 1 :], **options))
    except ValueError as error:
        parser.error(str(error))


def _settings(every_s: float, run_dir: str) -> WatchSettings:
    remedy = "10 is a good pace, 0 writes no lines."
    check_range("evenstep watch --every", every_s, "finite and at least 0", remedy)
    return WatchSettings(every_s, str(Path(run_dir).absolute()) if run_dir else "")


def _started(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(list(command), env=env)
    except OSError as error:
        got = f"{command[0]} ({error.strerror or error})"
        remedy = "Name what starts the script too, as in `-- torchrun train.py`."
        raise invalid("evenstep watch COMMAND", "be one that can run", got, remedy) from error


def _pass_on(child: subprocess.Popen[bytes], number: int) -> None:
    """Pass a signal on; a Ctrl-C has reached the command already."""
    if number != signal.SIGINT or not _hears_terminal():
        child.send_signal(number)


def _hears_terminal() -> bool:
    """Return whether Ctrl-C reaches this process and the command, wherever its input comes from."""
    if not hasattr(os, "tcgetpgrp"):
        return sys.stdin is not None and sys.stdin.isatty()
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _say_the_rest(folder: Path, *, ended_well: bool) -> None:
    """Say what no rank said itself."""
    if not (folder / SEEN).exists():
        if ended_well:
            print(_UNSEEN, file=sys.stderr)
    elif (folder / SUMMARY).exists():
        print((folder / SUMMARY).read_text("utf-8"), end="", file=sys.stderr)
