"""Training between hosts that are hard to reach, or to tell apart: network namespaces, as root."""

import pytest

from .hosts import Hosts, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

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
