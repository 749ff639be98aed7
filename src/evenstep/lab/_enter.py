"""Become a process of a lab's host: its network, its names, its quota; then run the command.

A script of the standard library alone, so that it starts at once:
NETWORK NAME HOSTS MEMBERS COMMAND...
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

_CLONE_NEWNET, _CLONE_NEWUTS, _CLONE_NEWNS = 0x40000000, 0x04000000, 0x00020000
_MS_BIND, _MS_REC, _MS_SLAVE = 4096, 16384, 1 << 19
_HOSTS = "/etc/hosts"


def enter(network: str, name: str, hosts: str, members: str) -> None:
    """Move this process, before it becomes anything else.

    Args:
        network: file that holds the network namespace.
        name: what the host calls itself. evenstep and others take processes of one name for
            neighbours that can talk over 127.0.0.1.
        hosts: stands where ``/etc/hosts`` does for this process and its children: no other could
            resolve the names.
        members: file of a control group to write one's number to; empty for none.
    """
    if members:
        with open(members, "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    with open(network, "rb") as file_of_network:
        _call("setns", file_of_network.fileno(), _CLONE_NEWNET)
    _call("unshare", _CLONE_NEWUTS | _CLONE_NEWNS)
    socket.sethostname(name)
    # What is mounted here is seen in here alone; what others mount is seen here still.
    _call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
    if os.path.exists(_HOSTS):
        _call("mount", os.fsencode(hosts), _HOSTS.encode(), None, _MS_BIND, None)


def main() -> None:
    """Do it; 127 where there is no such command and 126 where it cannot be run, as in a shell."""
    network, name, hosts, members, *command = sys.argv[1:]
    enter(network, name, hosts, members)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
