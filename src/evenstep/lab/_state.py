"""What a lab has made, written down before it makes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from .._whole_file import write_whole
from ._namespaces import Namespace

PREFIX = "evenstep-lab"
"""What the names of everything that a lab makes begin with."""

RUN = Path("/run") / PREFIX
"""Holds, for each lab, a file that says what it made and a folder of its namespaces."""

_SUFFIX = ".json"


@final
@dataclass(frozen=True, slots=True)
class State:
    """One lab, by its names.

    Attributes:
        run_id: its own part of all names, letters and digits.
        pid: process that made it.
        started: when that process began, in ticks since the machine did; numbers are used again.
        num_hosts: how many hosts it has.
        group_root: where its control groups are; None if it has none.
    """

    run_id: str
    pid: int
    started: int
    num_hosts: int
    group_root: str | None

    def folder(self, run: Path) -> Path:
        """Return the folder of its namespaces."""
        return run / self.run_id

    def names(self, run: Path) -> Path:
        """Return the file that says which name has which address."""
        return self.folder(run) / "hosts"

    def switch(self, run: Path) -> Namespace:
        """Return the namespace that all links end in."""
        return Namespace(self.folder(run) / "switch")

    def host(self, run: Path, host: int) -> Namespace:
        """Return the namespace of a host."""
        return Namespace(self.folder(run) / f"h{host}")

    def group(self, host: int) -> Path | None:
        """Return the folder of a host's control group."""
        if self.group_root is None:
            return None
        return Path(self.group_root) / f"{PREFIX}-{self.run_id}-h{host}"

    def write(self, run: Path) -> None:
        """Write it down, whole or not at all."""
        run.mkdir(mode=0o755, exist_ok=True)
        write_whole(run / f"{self.run_id}{_SUFFIX}", [json.dumps(asdict(self))])

    def forget(self, run: Path) -> None:
        """Delete what was written: nothing of the lab is left by now."""
        (run / f"{self.run_id}{_SUFFIX}").unlink(missing_ok=True)

    def is_running(self) -> bool:
        """Whether the process that made it is there still."""
        return start_of(self.pid) == self.started


def read_states(run: Path) -> list[State]:
    """Return the labs that are written down.

    Raises:
        ValueError: a file there is not what a lab writes.
    """
    return [_read(file) for file in sorted(run.glob(f"*{_SUFFIX}"))] if run.is_dir() else []


def start_of(pid: int) -> int | None:
    """Return when a process began, in ticks since the machine did; None where there is none."""
    try:
        text = (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in brackets may hold blanks and brackets itself.
    fields = text.rpartition(")")[2].split()
    state, started = fields[0], int(fields[19])
    return None if state == "Z" else started


def _read(file: Path) -> State:
    """Return a lab whose names lead nowhere but to what a lab makes."""
    try:
        state = State(**json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(_unlike(file)) from error
    numbers = (state.pid, state.started, state.num_hosts)
    root = state.group_root
    if not (
        state.run_id == file.name.removesuffix(_SUFFIX)
        and state.run_id.isalnum()
        and all(type(number) is int for number in numbers)
        and (root is None or (isinstance(root, str) and Path(root).is_absolute()))
    ):
        raise ValueError(_unlike(file))
    return state


def _unlike(file: Path) -> str:
    return f"{file} is not what a lab writes, so nothing was done about it. Look at it by hand."
