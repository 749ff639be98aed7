"""Cells of a benchmark, each in a process of its own, kept in one JSON file as they end."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any

from benchmarks._common import ROOT, progress

LAST_LINES = 40
"""Lines of standard error that are kept of a cell that failed."""

Found = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """What runs a cell.

    Attributes:
        words: prints one JSON object on standard output. Of ``{"not_run": reason}`` the reason is
            kept; anything else is the cell's result.
        timeout_s: after which the process and those that it started are killed.
    """

    words: list[str]
    timeout_s: float


def run_cells(
    commands: Mapping[str, Command], path: Path, header: Mapping[str, Any]
) -> Iterator[tuple[str, Found]]:
    """Yield what was found in each cell, and write the file after each.

    A cell whose result is in the file is not run again; one that failed or was not run is. What a
    cell is: ``status`` ("done", "failed", "not run"), ``seconds``, ``ended`` (a date), and
    ``result``, ``error`` or ``reason``.

    Args:
        commands: by the name of the cell, in the order in which they run.
        path: of the file; it is made where it is missing.
        header: what else is to be in the file. All of it but ``began`` and ``command`` has to be
            as it is in a file that is there.

    Raises:
        SystemExit: the file that is there has another header.
    """
    told = _opened(path, header)
    for number, (name, command) in enumerate(commands.items(), start=1):
        found = told["cells"].get(name)
        where = f"{number} of {len(commands)}: {name}"
        if found is not None and found["status"] == "done":
            progress(f"{where} is in {path.name}")
        else:
            progress(f"{where}, at most {command.timeout_s / 60:.0f} min")
            told["cells"][name] = found = run_cell(command)
            _write(path, told)
        yield name, found


def run_cell(command: Command) -> Found:
    """Run a cell and return what was found; its standard error is passed on as it comes."""
    began_s, last = monotonic(), deque[str](maxlen=LAST_LINES)
    with (
        tempfile.TemporaryFile("w+") as answer,
        subprocess.Popen(
            command.words,
            stdout=answer,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that all that it starts can be ended with it
        ) as process,
    ):
        assert process.stderr is not None
        too_late = Timer(command.timeout_s, _end, (process.pid,))
        too_late.start()
        try:
            for line in process.stderr:
                sys.stderr.write(line)
                last.append(line)
            status = process.wait()
        finally:
            too_late.cancel()
            _end(process.pid)
        answer.seek(0)
        found = _outcome(answer.read(), status, anonymous("".join(last)))
    took_s = monotonic() - began_s
    if found["status"] == "failed" and took_s >= command.timeout_s:
        found["error"] = f"ended after {command.timeout_s:g} s, its time limit\n{found['error']}"
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    return {**found, "seconds": round(took_s, 1), "ended": ended}


def anonymous(text: str) -> str:
    """Return a text for others to read, without this host's name and the user's folders."""
    text = text.replace(f"{ROOT}{os.sep}", "").replace(str(Path.home()), "~")
    return re.sub(rf"\b{re.escape(platform.node())}\b", "HOST", text) if platform.node() else text


def _outcome(answer: str, status: int, last: str) -> Found:
    """Return status and result of a process that has ended."""
    if status:
        return {"status": "failed", "error": f"exit status {status}\n{last}"}
    try:
        result = json.loads(answer)
    except json.JSONDecodeError:
        return {"status": "failed", "error": f"no JSON, but {answer[-200:]!r}\n{last}"}
    if "not_run" in result:
        return {"status": "not run", "reason": result["not_run"]}
    return {"status": "done", "result": result}


def _end(group: int) -> None:
    """Kill what is left of a process and of those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _opened(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the file, or that of a new one."""
    if not path.exists():
        return {**header, "cells": {}}
    told: dict[str, Any] = json.loads(path.read_text("utf-8"))
    own = {"began", "command"}  # of each run
    unlike = [key for key in header if key not in own and told.get(key) != header[key]]
    if unlike:
        sys.exit(
            f"{path} is of another {', '.join(unlike)} than this run. A file holds cells of one "
            f"machine, one source and one size: name a new file."
        )
    return told


def _write(path: Path, told: dict[str, Any]) -> None:
    """Write the file as a whole, so that a run that is broken off leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    os.replace(partial, path)
