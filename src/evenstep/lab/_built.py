"""What a lab has in the kernel: namespaces, links and groups, made and changed together."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import final

from .._whole_file import write_whole
from . import _links
from ._cpu_groups import make_group, members_file, remove_group, set_cpus
from ._host import Host, LabUnavailable, Rate
from ._links import Namespace

PREFIX = "evenstep-lab"
"""What the names of everything that a lab makes begin with."""

RUN = Path("/run") / PREFIX
"""Holds, for each lab, a file that says what it made and a folder of its namespaces."""

_SUFFIX = ".json"
_ENTER = Path(__file__).with_name("_enter.py")
_PATIENCE_S = 5.0


@final
@dataclass(frozen=True, slots=True)
class Built:
    """One lab in the kernel, by its names, from ``make`` to ``remove``.

    Attributes:
        run_id: its own part of all names, letters and digits.
        pid: process that made it.
        started: when that process began, in ticks since the machine did; numbers are used again.
        num_hosts: how many hosts it has.
        group_root: where its control groups are; None if it has none.
        run: where it is written down.
    """

    run_id: str
    pid: int
    started: int
    num_hosts: int
    group_root: str | None
    run: Path = RUN

    @property
    def folder(self) -> Path:
        """The folder of its namespaces."""
        return self.run / self.run_id

    @property
    def names(self) -> Path:
        """The file that says which name has which address."""
        return self.folder / "hosts"

    @property
    def switch(self) -> Namespace:
        """The namespace that all links end in."""
        return Namespace(self.folder / "switch")

    def host(self, host: int) -> Namespace:
        """Return the namespace of a host."""
        return Namespace(self.folder / f"h{host}")

    def group(self, host: int) -> Path | None:
        """Return the folder of a host's control group."""
        if self.group_root is None:
            return None
        return Path(self.group_root) / f"{PREFIX}-{self.run_id}-h{host}"

    def is_running(self) -> bool:
        """Whether the process that made it is there still."""
        return start_of(self.pid) == self.started

    def write(self) -> None:
        """Write it down, whole or not at all."""
        self.run.mkdir(mode=0o755, exist_ok=True)
        fields = asdict(self)
        del fields["run"]
        write_whole(self.run / f"{self.run_id}{_SUFFIX}", [json.dumps(fields)])

    def make(self, hosts: Sequence[Host], *, delay_ms: float) -> None:
        """Write down what is going to be made, then make it.

        Args:
            hosts: all of them.
            delay_ms: what packets wait on their way out.
        """
        self.write()
        self.folder.mkdir()
        names = [(address_of(number), name_of(number)) for number in range(len(hosts))]
        # The second form too: torch looks for it, and complains at length.
        lines = (
            f"{address} {name}\n::ffff:{address} {name}\n"
            for address, name in [("127.0.0.1", "localhost"), *names]
        )
        self.names.write_text("".join(lines), encoding="ascii")
        self.switch.make()
        _links.make_switch(self.switch)
        for number, host in enumerate(hosts):
            self._make_host(number, host, delay_ms)

    def _make_host(self, number: int, host: Host, delay_ms: float) -> None:
        namespace, group = self.host(number), self.group(number)
        namespace.make()
        address = f"{address_of(number)}/24"
        _links.connect(self.switch, namespace, port=f"h{number}", address=address)
        if delay_ms:
            _links.set_delay(namespace, _links.INTERFACE, delay_ms)
        self.shape(number, None, host.mbit, delayed=delay_ms > 0)
        if group is not None:
            make_group(group)
            set_cpus(group, host.cpus)

    def shape(self, host: int, before: Rate | None, rate: Rate | None, *, delayed: bool) -> None:
        """Shape both ends of a link, each its own way out; None no longer does."""
        if before is None and rate is None:
            return
        up, down = (None, None) if rate is None else rate
        _links.set_rate(self.host(host), _links.INTERFACE, up, delayed=delayed)
        _links.set_rate(self.switch, f"h{host}", down)

    def set_cpus(self, host: int, cpus: float | None) -> None:
        """Change a quota.

        Raises:
            LabUnavailable: there are no groups.
        """
        group = self.group(host)
        if group is None:
            message = "CPU quotas need control groups with the CPU's, and none is mounted."
            raise LabUnavailable(message)
        set_cpus(group, cpus)

    def entering(self, host: int) -> list[str]:
        """Return what stands in front of a command that is to run on a host."""
        group = self.group(host)
        joined = "" if group is None else str(members_file(group))
        # -S, -E: neither site packages nor the variables that are meant for the command.
        enter = [sys.executable, "-S", "-E", str(_ENTER)]
        return [*enter, str(self.host(host).path), name_of(host), str(self.names), joined]

    def remove(self) -> int:
        """Remove all of it, as far as it got, and return how many processes were killed.

        Raises:
            OSError: something cannot be removed. The rest is, and ``clean`` may try again.
        """
        hosts = range(self.num_hosts)
        namespaces = [self.switch, *map(self.host, hosts)]
        killed = _kill_all(namespaces)
        groups = [group for host in hosts if (group := self.group(host)) is not None]
        removals: list[Callable[[], None]] = [partial(remove_group, group) for group in groups]
        removals += [namespace.remove for namespace in namespaces]
        errors: list[OSError] = []
        for removal in removals:
            try:
                removal()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        self.names.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            self.folder.rmdir()
        (self.run / f"{self.run_id}{_SUFFIX}").unlink(missing_ok=True)
        with suppress(OSError):
            self.run.rmdir()
        return killed


def described(num_hosts: int, group_root: Path | None) -> Built:
    """Return a lab of this process that is not made yet."""
    started = start_of(os.getpid())
    assert started is not None
    root = None if group_root is None else str(group_root)
    return Built(secrets.token_hex(4), os.getpid(), started, num_hosts, root)


def read_states(run: Path) -> list[Built]:
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


def _read(file: Path) -> Built:
    """Return a lab whose names lead nowhere but to what a lab makes."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        state = Built(**{**fields, "run": file.parent})
    except (TypeError, ValueError) as error:
        raise ValueError(_different(file)) from error
    numbers = (state.pid, state.started, state.num_hosts)
    root = state.group_root
    if not (
        state.run_id == file.name.removesuffix(_SUFFIX)
        and state.run_id.isalnum()
        and all(type(number) is int for number in numbers)
        and (root is None or (isinstance(root, str) and Path(root).is_absolute()))
    ):
        raise ValueError(_different(file))
    return state


def _different(file: Path) -> str:
    return f"{file} is not what a lab writes, so nothing was done about it. Look at it by hand."


def clean(run: Path = RUN) -> tuple[tuple[Built, int | None], ...]:
    """Remove what labs left whose process died without doing so itself: by SIGKILL, say.

    Processes on their hosts are killed, then groups, links and namespaces go. Only what a lab wrote
    down as its own is touched, under names that labs alone have. A lab whose process is running is
    left alone.

    Args:
        run: where labs write down what they make.

    Returns:
        The labs that were found, each with how many processes were killed; None where it runs.

    Raises:
        ValueError: a file there is not what a lab writes.
        OSError: something cannot be removed; the rest is.
    """
    found = [(state, None if state.is_running() else state.remove()) for state in read_states(run)]
    with suppress(OSError):
        run.rmdir()  # where other labs are, they need it
    return tuple(found)


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


def address_of(host: int) -> str:
    """Return the address of a host, from 0."""
    return f"10.77.0.{host + 1}"


def name_of(host: int) -> str:
    """Return what a host calls itself, and the others call it."""
    return f"lab-h{host}"


def environment() -> dict[str, str]:
    """Return what makes libraries use the link, and not the loop."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    return dict.fromkeys(names, _links.INTERFACE)
