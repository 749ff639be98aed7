"""Limits of control groups, from files as kernels write them."""

import pytest

from evenstep._host import Cgroups

from .linux_root import LinuxRoot

FAR_S = 0.25


@pytest.fixture(params=[1, 2])
def nested(request, tmp_path):
    """A process two groups deep, under either version."""
    return LinuxRoot(tmp_path, request.param, "/pod/box")


@pytest.mark.parametrize("tightest", ["/pod/box", "/pod", ""])
def test_the_tightest_quota_binds_wherever_it_is_set(nested, tightest):
    """On the own group, or on any around it."""
    for group in ("/pod/box", "/pod", ""):
        nested.quota(group, 1.5 if group == tightest else 3.0)
    cores, file = Cgroups.find(nested.root).quota()

    assert cores == 1.5
    assert f"{tightest}/cpu." in str(file)


@pytest.mark.parametrize("text", ["-1\n", "max 100000\n", "0\n", "", "nonsense 1 2\n", "0 0\n"])
def test_no_quota_is_none(nested, text):
    """Each version has a word of its own for it; damage is no quota either."""
    nested.quota("/pod/box", text)

    assert Cgroups.find(nested.root).quota() is None


def test_what_cannot_be_read_is_no_limit(nested):
    """A folder stands where a file should be: it opens for nobody, root included."""
    for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.stat", "memory.max", "cpu.pressure"):
        for folder in ("", "cpu,cpuacct/", "memory/"):
            (nested.root / f"sys/fs/cgroup/{folder}pod/box/{name}").mkdir(parents=True)
    groups = Cgroups.find(nested.root)

    assert groups.quota() is None
    assert groups.free_bytes() is None
    assert set(groups.throttled_s()) == {0.0}
    assert groups.waited_s() is None


@pytest.mark.parametrize("group", ["/docker/abc", "/", "/docker/abc/../.."])
def test_a_container_sees_its_own_group_at_the_mount(tmp_path, group):
    """Under the host's name for it, or under none."""
    box = LinuxRoot(tmp_path, 2, group, mounted="/docker/abc")
    box.quota("", 2.0)

    assert Cgroups.find(box.root).quota()[0] == 2.0


def test_no_groups_are_no_limit(tmp_path):
    """Outside Linux."""
    assert Cgroups.find(tmp_path) == Cgroups()


def test_a_changed_quota_is_there_at_the_next_call(nested):
    """Folders are found once, files are read each time: one that appears later counts as well."""
    groups = Cgroups.find(nested.root)
    assert groups.quota() is None
    for folder in (*groups.first_cpu, *groups.second):
        folder.mkdir(parents=True, exist_ok=True)

    for cores in (0.5, 0.25, 2.0):
        nested.quota("", cores)
        assert groups.quota()[0] == cores


def test_memory_left_counts_what_a_group_caches(nested):
    """The tightest group's limit, less what it uses, and what it would give back."""
    nested.memory("/pod/box", "max" if nested.version == 2 else str(2**63 - 4096), 1, 1)
    nested.memory("/pod", "4000", 3000, 500)
    nested.memory("", "9000", 1000, 0)

    assert Cgroups.find(nested.root).free_bytes() == 1500


def test_what_quotas_held_back_is_read_of_each_group(nested):
    """The innermost first, in seconds in both versions."""
    nested.quota("/pod/box", 1.0)  # the group is there
    nested.throttled("/pod/box", FAR_S)
    nested.throttled("/pod", 7.0)

    assert Cgroups.find(nested.root).throttled_s() == pytest.approx((FAR_S, 7.0, 0.0))


def test_pressure_is_that_of_the_own_group(tmp_path):
    """Of version 2, and in it of the line for some process."""
    box = LinuxRoot(tmp_path, 2, "/pod/box")
    box.pressure("/pod/box", FAR_S)
    box.pressure("/pod", 9.0)

    assert Cgroups.find(box.root).waited_s() == FAR_S
