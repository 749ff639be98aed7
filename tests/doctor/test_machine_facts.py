"""What is read of a machine, from files as kernels write them."""

import os
import socket

import pytest

from evenstep._doctor import (
    gpus_of_driver,
    read_cpu,
    read_network,
    read_room,
    read_variables,
)
from evenstep._host import Cgroups


def tree(root, **files):
    """Write files, ``/`` in their names written as ``__``."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write(root, path, text):
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_pressure_and_governor_are_read(tmp_path):
    """Of the first core that the process may run on."""
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    pressure = "some avg10=1.00 avg60=37.50 avg300=0.00 total=1\nfull avg10=0.00 avg60=9.00\n"
    root = tree(tmp_path, proc__pressure__cpu=pressure)
    folder = f"/sys/devices/system/cpu/cpu{core}/cpufreq"
    write(root, f"{folder}/scaling_governor", "powersave\n")
    write(root, f"{folder}/scaling_driver", "acpi-cpufreq\n")
    write(root, "/a/cpu.max", "250000 100000\n")
    cpu = read_cpu(3, Cgroups(second=(root / "a",)), root)

    assert (cpu.pressure, cpu.num_threads) == (0.375, 3)
    assert (cpu.governor, cpu.governor_driver) == ("powersave", "acpi-cpufreq")
    assert (cpu.quota_cores, cpu.quota_file) == (2.5, "/a/cpu.max")
    assert core in cpu.affinity


def test_a_bare_machine_has_few_facts(tmp_path):
    """None stands for what cannot be read."""
    cpu, room = read_cpu(1, Cgroups(), tmp_path), read_room(Cgroups(), tmp_path)

    assert (cpu.pressure, cpu.governor) == (None, "")
    assert (room.available_bytes, room.memory_pressure, room.shared_bytes) == (None, None, None)
    assert gpus_of_driver(tmp_path) == 0


def test_memory_is_what_machine_and_group_leave(tmp_path):
    """The smaller of both."""
    root = tree(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:   6 kB\n")
    group = tree(root / "a", **{"memory.max": "7000", "memory.current": "2000"})

    assert read_room(Cgroups(), root).available_bytes == 6144
    assert read_room(Cgroups(second=(group,)), root).available_bytes == 5000


def test_variables_that_matter_are_kept():
    """And no others: the file may be passed on."""
    given = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x"}

    assert read_variables(given) == {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO"}


def test_cards_of_the_driver_are_counted(tmp_path):
    """Torch may see none of them."""
    write(tmp_path, "/proc/driver/nvidia/gpus/0000:01/information", "")
    write(tmp_path, "/proc/driver/nvidia/gpus/0000:02/information", "")

    assert gpus_of_driver(tmp_path) == 2


def test_an_interface_that_is_set_gives_the_address(tmp_path):
    """As gloo has it; the host's own name is not looked up for it."""
    found = read_network({"GLOO_SOCKET_IFNAME": "lo"}, "localhost", tmp_path, 7)

    assert (found.interface, found.address, found.port) == ("lo", "127.0.0.1", 7)
    assert found.interfaces is None  # they cannot be listed under this root


def test_interfaces_are_listed_with_their_rates(tmp_path):
    """Those of the machine that have an address; the loopback is none of them."""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    for name in [*names, "lo", "gone9"]:
        write(tmp_path, f"/sys/class/net/{name}/speed", "10000\n")
    found = read_network({}, "localhost", tmp_path).interfaces

    assert set(found) <= set(names)
    assert set(found.values()) <= {10_000}


@pytest.mark.parametrize("kind", ["bridge/bridge_id", "tun_flags"])
def test_a_bridge_or_tunnel_has_no_rate(tmp_path, kind):
    """It stays in the list, but the figure that the kernel has is of no cable."""
    names = [name for _, name in socket.if_nameindex()]
    for name in names:
        write(tmp_path, f"/sys/class/net/{name}/speed", "10000\n")
    known = read_network({}, "localhost", tmp_path).interfaces
    for name in names:
        write(tmp_path, f"/sys/class/net/{name}/{kind}", "x\n")

    assert read_network({}, "localhost", tmp_path).interfaces == dict.fromkeys(known, 0)
