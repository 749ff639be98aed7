"""Two hosts for tests: network namespaces joined by a cable, made by `ip`, removed at the end."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_NAMES = Path("/etc/netns")  # what lies in there stands in the place of /etc


class Hosts:
    """Two namespaces with the host name of this machine, and the addresses of their interface.

    Args:
        addresses: one of each host, with the length of the network's part.
    """

    interface = "cable"

    def __init__(self, addresses):
        self.addresses = [address.partition("/")[0] for address in addresses]
        self.names = [f"evenstep-{os.getpid()}-{number}" for number in (0, 1)]

    def run(self, script, *, timeout_s=100, **environment):
        """Return what rank 0 and rank 1 of a script print, each on a host of its own."""
        shared = {
            **os.environ,
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": "29500",
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, str(script)],
                env={**shared, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(self.names)
        ]
        try:
            said = [rank.communicate(timeout=timeout_s) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert [rank.returncode for rank in ranks] == [0, 0], said
        return [out for out, _ in said]


@contextmanager
def two_hosts(addresses):
    """Make two hosts; skips the test, with the reason, where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and the command `ip`")
    hosts = Hosts(addresses)
    with ExitStack() as stack:
        for name in hosts.names:
            _make(stack, name)
        _write_names(hosts)
        first, second = hosts.names
        cable = ["link", "add", hosts.interface, "netns", first, "type", "veth"]
        _ip(*cable, "peer", "name", hosts.interface, "netns", second)
        for name, address in zip(hosts.names, addresses, strict=True):
            inside = ["-n", name]
            # None that it gives itself: a host without IPv4 has this address then, and no other.
            _ip(*inside, "link", "set", hosts.interface, "addrgenmode", "none")
            _ip(*inside, "addr", "add", address, "dev", hosts.interface, *_at_once(address))
            for each in ("lo", hosts.interface):
                _ip(*inside, "link", "set", each, "up")
            if ":" in address:
                _ip(*inside, "addr", "del", "127.0.0.1/8", "dev", "lo")
        yield hosts


def _make(stack, name):
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")
    stack.callback(_ip, "netns", "del", name)
    folder = _NAMES / name
    folder.mkdir(parents=True)
    stack.callback(shutil.rmtree, folder)


def _write_names(hosts):
    """Have each host know its own address by this machine's name, and the other's by another."""
    for name, own in zip(hosts.names, hosts.addresses, strict=True):
        (other,) = set(hosts.addresses) - {own}
        text = f"{own} {socket.gethostname()}\n{other} other\n"
        (_NAMES / name / "hosts").write_text(text, encoding="ascii")


def _at_once(address):
    """No look for others that have the address: it would take a second."""
    return ["nodad"] if ":" in address else []


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)
