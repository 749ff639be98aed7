"""Quotas: which control groups a machine has, what is written where, and how a group goes."""

import os
from pathlib import Path

import pytest

from evenstep.lab import LabUnavailable
from evenstep.lab._cpu_groups import (
    CpuGroupsV1,
    CpuGroupsV2,
    find_cpu_groups,
    members,
    remove_group,
)

LINE = "30 24 0:26 / {mount} rw,relatime shared:9 - {kind} cgroup {options}"


def mounted(mount, kind, options="rw"):
    return LINE.format(mount=mount, kind=kind, options=options)


@pytest.fixture
def second(tmp_path):
    """A folder that imitates what is mounted for the second version."""
    root = tmp_path / "unified"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (root / "cgroup.subtree_control").write_text("cpu memory\n")
    return root


def test_the_first_version_is_found_where_the_cpu_is_mounted():
    """Beside other hierarchies; a joint one counts, a similar name does not."""
    lines = [
        "22 1 8:1 / / rw - ext4 /dev/sda rw",
        mounted("/sys/fs/cgroup/cpuset", "cgroup", "rw,cpuset"),
        mounted("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"),
    ]
    found = find_cpu_groups("\n".join(lines))

    assert isinstance(found, CpuGroupsV1)
    assert found.root == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert find_cpu_groups("\n".join(lines[:2])) is None


def test_the_second_version_counts_if_it_has_the_cpu(second):
    """On a machine with both, only one of them has it."""
    line = mounted(second, "cgroup2")
    assert isinstance(find_cpu_groups(line), CpuGroupsV2)
    assert find_cpu_groups(line).root == second

    first = mounted("/sys/fs/cgroup/cpu", "cgroup", "rw,cpu")
    assert isinstance(find_cpu_groups(f"{line}\n{first}"), CpuGroupsV1)
    (second / "cgroup.controllers").write_text("io memory\n")
    assert find_cpu_groups(line) is None


def test_a_mount_with_a_blank_is_read():
    """mountinfo writes it as a number."""
    found = find_cpu_groups(mounted("/mnt/two\\040words", "cgroup", "rw,cpu"))

    assert found.root == Path("/mnt/two words")


def test_quotas_of_the_first_version(tmp_path):
    """Microseconds in each period of 10 ms; -1 is none."""
    groups = CpuGroupsV1(tmp_path)
    groups.make("evenstep-lab-x-h0")
    group = tmp_path / "evenstep-lab-x-h0"

    assert (group / "cpu.cfs_period_us").read_text() == "10000"
    for cpus, written in ((0.25, "2500"), (1.5, "15000"), (None, "-1")):
        groups.set_cpus("evenstep-lab-x-h0", cpus)
        assert (group / "cpu.cfs_quota_us").read_text() == written


def test_quotas_of_the_second_version(second):
    """Quota and period in one file; max is none."""
    groups = CpuGroupsV2(second)
    groups.make("evenstep-lab-x-h0")

    for cpus, written in ((0.25, "2500 10000"), (1.5, "15000 10000"), (None, "max 10000")):
        groups.set_cpus("evenstep-lab-x-h0", cpus)
        assert (second / "evenstep-lab-x-h0" / "cpu.max").read_text() == written
    assert (second / "cgroup.subtree_control").read_text() == "cpu memory\n"  # it was on already


def test_the_second_version_is_told_to_pass_the_cpu_on(second):
    """Where it was not done before: a group without it has no quota."""
    (second / "cgroup.subtree_control").write_text("memory\n")
    groups = CpuGroupsV2(second)
    groups.make("evenstep-lab-x-h0")
    groups.set_cpus("evenstep-lab-x-h0", 0.5)

    assert (second / "cgroup.subtree_control").read_text() == "+cpu"


def test_a_machine_that_does_not_pass_the_cpu_on_is_explained(second):
    """As in a container: what would help is said, to those who ask for a quota."""
    (second / "cgroup.subtree_control").unlink()
    groups = CpuGroupsV2(second)
    groups.make("evenstep-lab-x-h0")
    groups.set_cpus("evenstep-lab-x-h0", None)
    with pytest.raises(LabUnavailable, match="Run on the machine itself"):
        groups.set_cpus("evenstep-lab-x-h0", 0.5)


def test_a_group_goes_with_its_members(tmp_path):
    """They are killed, and killed again until the folder can go; one that is gone is no matter."""
    group, killed = tmp_path / "group", []
    group.mkdir()
    (group / "cgroup.procs").write_text("12\n34\n")

    def kill(pid):
        killed.append(pid)
        (group / "cgroup.procs").unlink(missing_ok=True)  # the kernel's own go with the folder

    remove_group(group, kill)
    remove_group(group, kill)

    assert killed == [12, 34]
    assert not group.exists()


def test_the_process_itself_is_never_killed(tmp_path):
    """Somebody may clean up from inside; the group stays, and it is said."""
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n")
    with pytest.raises(OSError, match="not empty"):
        remove_group(tmp_path, pytest.fail)
    assert members(tmp_path) == [os.getpid()]
