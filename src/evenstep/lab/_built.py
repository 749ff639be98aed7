"""What a lab has in the kernel: namespaces, links and groups, made and changed together."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import final

from . import _links
from ._cpu_groups import AbstractCpuGroups, members_file
from ._host import Host, Rate
from ._links import Traffic
from ._machine import LabUnavailable
from ._remains import remove
from ._state import RUN, State, start_of

_ENTER = Path(__file__).with_name("_enter.py")


@final
class Built:
    """Hosts in the kernel, from ``make`` to ``remove``.

    Args:
        num_hosts: how many.
        groups: what quotas are made of; None has none.
        delay_ms: what packets wait on their way out.

    Attributes:
        state: names of all that is made.
    """

    def __init__(
        self, num_hosts: int, *, groups: AbstractCpuGroups | None, delay_ms: float
    ) -> None:
        started = start_of(os.getpid())
        assert started is not None
        root = None if groups is None else str(groups.root)
        self.state = State(secrets.token_hex(4), os.getpid(), started, num_hosts, root)
        self._groups = groups
        self._delay_ms = delay_ms

    def make(self, hosts: Sequence[Host]) -> None:
        """Write down what is going to be made, then make it."""
        self.state.write(RUN)
        self.state.folder(RUN).mkdir()
        names = [(address_of(number), name_of(number)) for number in range(len(hosts))]
        # The second form too: torch looks for it, and complains at length.
        lines = (
            f"{address} {name}\n::ffff:{address} {name}\n"
            for address, name in [("127.0.0.1", "localhost"), *names]
        )
        self.state.names(RUN).write_text("".join(lines), encoding="ascii")
        self.state.switch(RUN).make()
        _links.make_switch(self.state.switch(RUN))
        for number, host in enumerate(hosts):
            self._make_host(number, host)

    def remove(self) -> None:
        """Remove everything, as far as it was made, and end the processes on all hosts."""
        remove(self.state)

    def shape(self, host: int, before: Rate | None, rate: Rate | None) -> None:
        """Shape both ends of a link, each its own way out; None no longer does."""
        if before is None and rate is None:
            return
        up, down = (None, None) if rate is None else rate
        namespace, delayed = self.state.host(RUN, host), self._delay_ms > 0
        _links.set_rate(namespace, _links.INTERFACE, up, delayed=delayed)
        _links.set_rate(self.state.switch(RUN), f"h{host}", down)

    def set_cpus(self, host: int, cpus: float | None) -> None:
        """Change a quota.

        Raises:
            LabUnavailable: there are no groups.
        """
        group = self.state.group(host)
        if self._groups is None or group is None:
            message = "CPU quotas need control groups with the CPU's, and none is mounted."
            raise LabUnavailable(message)
        self._groups.set_cpus(group.name, cpus)

    def traffic(self, host: int) -> Traffic:
        """Return what a host's interface counted."""
        return _links.traffic(self.state.host(RUN, host), _links.INTERFACE)

    def entering(self, host: int) -> list[str]:
        """Return what stands in front of a command that is to run on a host."""
        group = self.state.group(host)
        joined = "" if group is None else str(members_file(group))
        namespace, names = self.state.host(RUN, host).path, self.state.names(RUN)
        # -S, -E: neither site packages nor the variables that are meant for the command.
        enter = [sys.executable, "-S", "-E", str(_ENTER)]
        return [*enter, str(namespace), name_of(host), str(names), joined]

    def _make_host(self, number: int, host: Host) -> None:
        namespace, group = self.state.host(RUN, number), self.state.group(number)
        namespace.make()
        address = f"{address_of(number)}/24"
        _links.connect(self.state.switch(RUN), namespace, port=f"h{number}", address=address)
        if self._delay_ms:
            _links.set_delay(namespace, _links.INTERFACE, self._delay_ms)
        self.shape(number, None, host.mbit)
        if self._groups is not None and group is not None:
            self._groups.make(group.name)
            self._groups.set_cpus(group.name, host.cpus)


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
