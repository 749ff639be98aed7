"""Training between hosts that are hard to reach, or to tell apart: network namespaces, as root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

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


IPV4, IPV6 = ("10.91.0.1/24", "10.91.0.2/24"), ("fd91::1/64", "fd91::2/64")
SCRIPT = """
import os
import subprocess
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.torch import Balancer, Runtime

def note(event, arguments):
    if event == "socket.bind" and arguments[1][1] == 29650:
        print(arguments[1][0] or "everywhere")

sys.addaudithook(note)
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 8))
with Balancer(runtime=Runtime(line_every=None, ports=29650)) as balancer:
    model, loader = balancer.prepare(
        DistributedDataParallel(torch.nn.Linear(8, 1)), DataLoader(data, batch_size=8)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_steps = 0
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
        if (dist.get_rank(), num_steps) == (1, 5) and "DOWN_S" in os.environ:
            subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
            subprocess.Popen(["sh", "-c", "sleep $DOWN_S; ip link set cable up"])
    print(num_steps, [round(p.sum().item(), 9) for p in model.parameters()])
"""


def trained(hosts, folder, **environment):
    """Return where rank 0 listened; both have trained, and have the same model."""
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    first, second = hosts.run(script, **environment)
    where, *result = first.splitlines()

    assert result == second.splitlines()
    assert result[0].startswith("20 ")
    return where


def test_two_hosts_of_one_name_train(tmp_path):
    """Each takes the other for another host, and does not look for it on its own loopback."""
    with two_hosts(IPV4) as hosts:
        assert trained(hosts, tmp_path) == "everywhere"


def test_hosts_without_ipv4_train(tmp_path):
    """Not even their loopback has an address of it."""
    with two_hosts(IPV6) as hosts:
        assert trained(hosts, tmp_path) == "everywhere"


@pytest.mark.parametrize("addresses", [IPV4, IPV6], ids=["IPv4", "IPv6"])
def test_the_interface_of_gloo_is_that_of_evenstep(tmp_path, addresses):
    """Rank 0 listens at its address, and nowhere else."""
    with two_hosts(addresses) as hosts:
        where = trained(hosts, tmp_path, GLOO_SOCKET_IFNAME=Hosts.interface)

    assert where == addresses[0].partition("/")[0]


def test_a_cable_that_is_pulled_for_some_seconds_loses_no_rank(tmp_path):
    """What was sent meanwhile arrives: a connection holds until one of its ends closes it."""
    with two_hosts(IPV4) as hosts:
        trained(hosts, tmp_path, DOWN_S="5")
