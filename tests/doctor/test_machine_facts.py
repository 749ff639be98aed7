"""What is read of a machine, from files as kernels write them."""

import os
import socket

import pytest

from evenstep._doctor import (
    CgroupLimits,
    gpus_of_driver,
    read_cgroups,
    read_cpu,
    read_network,
    read_room,
    read_variables,
)

V2_MOUNT = "30 25 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "31 25 0:27 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 25 0:28 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def tree(root, **files):
    """Write files, ``/`` in their names written as ``__``."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def second_version(root, group="/a/b", mounted="/"):
    return tree(
        root,
        proc__self__mountinfo=V2_MOUNT.format(root=mounted),
        proc__self__cgroup=f"0::{group}\n",
    )


def write(root, path, text):
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_second_version_s_tightest_quota_counts(tmp_path):
    """A group's own, or that of one around it."""
    root = second_version(tmp_path)
    write(root, "/sys/fs/cgroup/a/b/cpu.max", "400000 100000\n")
    write(root, "/sys/fs/cgroup/a/cpu.max", "150000 100000\n")
    write(root, "/sys/fs/cgroup/a/cpu.stat", "usage_usec 9\nthrottled_usec 2500000\n")
    write(root, "/sys/fs/cgroup/cpu.max", "max 100000\n")
    limits = read_cgroups(root)

    assert (limits.quota_cores, limits.quota_file) == (1.5, "/sys/fs/cgroup/a/cpu.max")
    assert limits.throttled_s() == 2.5


def test_the_first_version_s_quota_and_memory(tmp_path):
    """Each controller has a hierarchy of its own."""
    root = tree(
        tmp_path,
        proc__self__mountinfo=V1_MOUNTS.format(root="/"),
        proc__self__cgroup="4:cpu,cpuacct:/x\n3:memory:/y\n0::/\n",
    )
    write(root, "/sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "80000\n")
    write(root, "/sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n")
    write(root, "/sys/fs/cgroup/cpu,cpuacct/x/cpu.stat", "nr_throttled 3\nthrottled_time 7000000\n")
    write(root, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    write(root, "/sys/fs/cgroup/memory/y/memory.limit_in_bytes", "4000\n")
    write(root, "/sys/fs/cgroup/memory/y/memory.usage_in_bytes", "3000\n")
    write(root, "/sys/fs/cgroup/memory/y/memory.stat", "cache 7\ntotal_inactive_file 500\n")
    write(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "/sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n")
    limits = read_cgroups(root)

    assert limits.quota_cores == 0.8
    assert limits.throttled_s() == pytest.approx(0.007)
    assert limits.free_bytes == 1500


@pytest.mark.parametrize("group", ["/docker/abc", "/", "/docker/abc/../.."])
def test_a_container_sees_its_own_group_at_the_mount(tmp_path, group):
    """Under the host's name for it, or under none."""
    root = second_version(tmp_path, group=group, mounted="/docker/abc")
    write(root, "/sys/fs/cgroup/cpu.max", "200000 100000\n")

    assert read_cgroups(root).quota_cores == 2.0


@pytest.mark.parametrize("files", [{}, {"proc__self__mountinfo": "", "proc__self__cgroup": ""}])
def test_no_groups_are_no_limit(tmp_path, files):
    """Outside Linux, or where nothing is mounted."""
    assert read_cgroups(tree(tmp_path, **files)) == CgroupLimits()


@pytest.mark.parametrize("text", ["", "max\n", "nonsense 1 2\n", "7\n"])
def test_a_damaged_file_is_no_limit(tmp_path, text):
    """Facts that cannot be read are left out; nothing is guessed."""
    root = second_version(tmp_path)
    write(root, "/sys/fs/cgroup/a/b/cpu.max", text)
    write(root, "/sys/fs/cgroup/a/b/memory.max", text)

    assert read_cgroups(root) == CgroupLimits()


def test_pressure_load_and_governor_are_read(tmp_path):
    """Of the first core that the process may run on."""
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    pressure = "some avg10=1.00 avg60=37.50 avg300=0.00 total=1\nfull avg10=0.00 avg60=9.00\n"
    root = tree(tmp_path, proc__pressure__cpu=pressure, proc__loadavg="3.50 1.00 0.50 1/2 3\n")
    folder = f"/sys/devices/system/cpu/cpu{core}/cpufreq"
    write(root, f"{folder}/scaling_governor", "powersave\n")
    write(root, f"{folder}/scaling_driver", "acpi-cpufreq\n")
    cpu = read_cpu(3, CgroupLimits(2.5, "/q"), root)

    assert (cpu.pressure, cpu.load, cpu.num_threads) == (0.375, 3.5, 3)
    assert (cpu.governor, cpu.governor_driver) == ("powersave", "acpi-cpufreq")
    assert (cpu.quota_cores, cpu.quota_file) == (2.5, "/q")
    assert core in cpu.affinity


def test_a_bare_machine_has_few_facts(tmp_path):
    """None stands for what cannot be read."""
    cpu, room = read_cpu(1, CgroupLimits(), tmp_path), read_room(CgroupLimits(), tmp_path)

    assert (cpu.pressure, cpu.load, cpu.governor) == (None, 0.0, "")
    assert (room.available_bytes, room.memory_pressure, room.shared_bytes) == (None, None, None)
    assert gpus_of_driver(tmp_path) == 0


def test_memory_is_what_machine_and_group_leave(tmp_path):
    """The smaller of both."""
    root = tree(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:   6 kB\n")

    assert read_room(CgroupLimits(), root).available_bytes == 6144
    assert read_room(CgroupLimits(free_bytes=5000), root).available_bytes == 5000


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
