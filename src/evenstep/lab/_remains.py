"""Removing a lab: by itself at its end, or by others after its process died."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ._cpu_groups import remove_group
from ._namespaces import Namespace
from ._state import RUN, State, read_states

_PATIENCE_S = 5.0


@final
@dataclass(frozen=True, slots=True)
class Remains:
    """A lab that was found.

    Attributes:
        run_id: its part of all names.
        pid: process that made it.
        is_running: whether that process is there still, so that the lab was left alone.
        num_killed: processes that were killed.
        num_hosts: hosts that it has or had.
    """

    run_id: str
    pid: int
    is_running: bool
    num_killed: int
    num_hosts: int


def clean(run: Path = RUN) -> tuple[Remains, ...]:
    """Remove what labs left whose process died without doing so itself: by SIGKILL, say.

    Processes on their hosts are killed, then groups, links and namespaces go. Only what a lab wrote
    down as its own is touched, under names that labs alone have. A lab whose process is running is
    left alone.

    Args:
        run: where labs write down what they make.

    Returns:
        The labs that were found.

    Raises:
        ValueError: a file there is not what a lab writes.
        OSError: something cannot be removed; the rest is.
    """
    found: list[Remains] = []
    for state in read_states(run):
        running = state.is_running()
        killed = 0 if running else remove(state, run)
        found.append(Remains(state.run_id, state.pid, running, killed, state.num_hosts))
    with suppress(OSError):
        run.rmdir()  # where other labs are, they need it
    return tuple(found)


def remove(state: State, run: Path = RUN) -> int:
    """Remove all of a lab, as far as it got, and return how many processes were killed.

    Raises:
        OSError: something cannot be removed. The rest is, and ``clean`` may try again.
    """
    hosts = range(state.num_hosts)
    namespaces = [state.switch(run), *(state.host(run, host) for host in hosts)]
    errors: list[OSError] = []
    killed = _kill_all(namespaces)
    for group in map(state.group, hosts):
        try:
            if group is not None:
                remove_group(group, _kill)
        except OSError as error:
            errors.append(error)
    for namespace in namespaces:
        try:
            namespace.remove()
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    state.names(run).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        state.folder(run).rmdir()
    state.forget(run)
    with suppress(OSError):
        run.rmdir()
    return killed


def _kill_all(namespaces: list[Namespace]) -> int:
    """Kill until no process is left; one that was forked meanwhile is met in the next round."""
    until_s = time.monotonic() + _PATIENCE_S
    killed = 0
    while any([namespace.processes() for namespace in namespaces]):
        killed += sum(namespace.kill() for namespace in namespaces)
        if time.monotonic() > until_s:
            break
        time.sleep(0.01)
    return killed


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
