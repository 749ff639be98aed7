"""What a host may use: values that are checked, and the quotas that hold them."""

import errno
import math
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from evenstep.lab import Change, Host, Lab, LabUnavailable
from evenstep.lab._cpu_groups import find_cpu_groups, make_group, members, remove_group, set_cpus
from evenstep.lab._host import Rate, check_cores, check_machine
from evenstep.lab._links import Namespace, set_rate
from tests.form.test_surface import run


def test_one_rate_stands_for_both_ways():
    """Fields read one way, however they were given."""
    assert Host(mbit=50).mbit == Rate(up_mbit=50.0, down_mbit=50.0)
    assert Host(mbit=(20, 10)).mbit == Rate(up_mbit=20.0, down_mbit=10.0)
    assert Host() == Host(cpus=None, mbit=None)


@pytest.mark.parametrize("mbit", [0, -1, math.nan, math.inf, 20_000, (1, 0), (1, 2, 3), ()])
def test_a_rate_that_no_link_has_is_refused(mbit):
    """With the range."""
    with pytest.raises(ValueError, match=r"Host\(mbit=...\)` must be from 0.1 to 10000 Mbit/s"):
        Host(mbit=mbit)


@pytest.mark.parametrize("cpus", [0, 0.05, -1, math.nan, math.inf])
def test_a_quota_that_the_kernel_cannot_keep_is_refused(cpus):
    """A millisecond of ten is the least."""
    with pytest.raises(ValueError, match=r"Host\(cpus=...\)` must be finite and at least 0.1"):
        Host(cpus=cpus)


def test_quotas_are_compared_with_the_machine():
    """One host that asks for more than there is is refused; all together are warned of."""
    assert check_cores([Host(cpus=1.5), Host(), Host(cpus=0.5)], 2) is None
    with pytest.raises(ValueError, match="at most 2, the cores of this machine"):
        check_cores([Host(cpus=2.1)], 2)
    assert "2.3 cores together" in check_cores([Host(cpus=1.5), Host(cpus=0.8)], 2)


@pytest.mark.parametrize("hosts", [[], [Host()] * 251])
def test_a_lab_has_one_to_250_hosts(hosts):
    """As many as its network has addresses for."""
    with pytest.raises(ValueError, match="hold 1 to 250 hosts"):
        Lab(hosts)


@pytest.mark.parametrize("delay_ms", [-1, math.nan, 20_000])
def test_a_delay_that_makes_no_sense_is_refused(delay_ms):
    """Before anything is made."""
    with pytest.raises(ValueError, match=r"Lab\(delay_ms=...\)"):
        Lab([Host()], delay_ms=delay_ms)


@pytest.mark.parametrize(
    "ask",
    [
        lambda lab: lab.start(0, ["true"]),
        lambda lab: lab.torchrun(["script.py"]),
        lambda lab: lab.set_mbit(0, 5),
        lambda lab: lab.interface_bytes(0),
        lambda lab: lab.run_id,
    ],
)
def test_a_lab_is_there_within_its_with(ask):
    """Making the value makes nothing, and what needs hosts says so."""
    with pytest.raises(ValueError, match="between the beginning and the end of `with`"):
        ask(Lab([Host()]))


@pytest.mark.parametrize(
    ("system", "user", "packages", "words"),
    [
        ("Darwin", 0, True, "this is Darwin. Run it on Linux"),
        ("Windows", 0, True, "this is Windows. Run it on Linux"),
        ("", 0, True, "an unknown system"),
        ("Linux", 1000, True, "takes root. Run it with `sudo`"),
        ("Linux", 0, None, r"pip install .*\[lab\]"),
    ],
)
def test_where_no_lab_can_be_made_the_remedy_is_said(monkeypatch, system, user, packages, words):
    """Another system, another user, a missing package."""
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("evenstep.lab._host.find_spec", lambda name: packages)
    with pytest.raises(LabUnavailable, match=words):
        check_machine()


def test_a_kernel_without_a_token_bucket_is_explained(monkeypatch):
    """As one without netem is."""

    def unknown(*_):
        raise OSError(errno.ENOENT, "netlink: no such kind")

    monkeypatch.setattr("evenstep.lab._links._on", unknown)
    with pytest.raises(LabUnavailable, match=r"`Host\(mbit=...\)` needs tbf.*modprobe sch_tbf"):
        set_rate(Namespace(Path("none")), "eth0", 5.0)


@pytest.fixture
def imagined(monkeypatch):
    """A machine on which labs are made of nothing, and have no groups that can be written to."""
    built = Mock()
    monkeypatch.setattr("evenstep.lab._lab.check_machine", lambda: None)
    monkeypatch.setattr("evenstep.lab._lab.find_cpu_groups", lambda _: Path("groups"))
    monkeypatch.setattr("evenstep.lab._lab.os.access", lambda *_: False)
    monkeypatch.setattr("evenstep.lab._lab.described", built)
    return built


def test_control_groups_that_are_read_only_are_needed_for_quotas_alone(imagined):
    """As those of most containers are. Links do without."""
    with Lab([Host(mbit=5)]):
        imagined.assert_called_once_with(1, None)
    with pytest.raises(LabUnavailable, match="can be written to"), Lab([Host(cpus=0.5)]):
        pytest.fail("made all the same")


@pytest.mark.usefixtures("imagined")
def test_a_trace_names_hosts_that_are_there():
    """Refused before anything changes."""
    with Lab([Host()] * 3) as lab, pytest.raises(ValueError, match=r"in \[0, 2\], got 3"):
        lab.play([Change(0, 3, mbit=5)])


@pytest.mark.usefixtures("imagined")
def test_torchrun_needs_torch(monkeypatch):
    """The rest of a lab does not."""
    monkeypatch.setattr("evenstep.lab._lab.find_spec", lambda name: None)
    with Lab([Host()]) as lab, pytest.raises(LabUnavailable, match=r"pip install .*\[torch\]"):
        lab.torchrun(["script.py"])


def test_importing_the_lab_loads_neither_torch_nor_pyroute2():
    """It can be imported wherever numpy is, and says what it needs when it is used."""
    loaded = run("import sys, evenstep.lab; print(*{name.split('.')[0] for name in sys.modules})")

    assert set(loaded.split()) & {"torch", "pyroute2", "typer", "rich", "asyncio"} == set()


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
    assert find_cpu_groups("\n".join(lines)) == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert find_cpu_groups("\n".join(lines[:2])) is None


def test_the_second_version_counts_if_it_has_the_cpu(second):
    """On a machine with both, only one of them has it."""
    line = mounted(second, "cgroup2")
    assert find_cpu_groups(line) == second

    first = mounted("/sys/fs/cgroup/cpu", "cgroup", "rw,cpu")
    assert find_cpu_groups(f"{line}\n{first}") == Path("/sys/fs/cgroup/cpu")
    (second / "cgroup.controllers").write_text("io memory\n")
    assert find_cpu_groups(line) is None


def test_a_mount_with_a_blank_is_read():
    """mountinfo writes it as a number."""
    found = find_cpu_groups(mounted("/mnt/two\\040words", "cgroup", "rw,cpu"))

    assert found == Path("/mnt/two words")


def test_quotas_of_the_first_version(tmp_path):
    """Microseconds in each period of 10 ms; -1 is none."""
    make_group(group := tmp_path / "evenstep-lab-x-h0")

    assert (group / "cpu.cfs_period_us").read_text() == "10000"
    for cpus, written in ((0.25, "2500"), (1.5, "15000"), (None, "-1")):
        set_cpus(group, cpus)
        assert (group / "cpu.cfs_quota_us").read_text() == written


def test_quotas_of_the_second_version(second):
    """Quota and period in one file; max is none."""
    make_group(group := second / "evenstep-lab-x-h0")

    for cpus, written in ((0.25, "2500 10000"), (1.5, "15000 10000"), (None, "max 10000")):
        set_cpus(group, cpus)
        assert (group / "cpu.max").read_text() == written
    assert (second / "cgroup.subtree_control").read_text() == "cpu memory\n"  # it was on already


def test_the_second_version_is_told_to_pass_the_cpu_on(second):
    """Where it was not done before: a group without it has no quota."""
    (second / "cgroup.subtree_control").write_text("memory\n")
    make_group(group := second / "evenstep-lab-x-h0")
    set_cpus(group, 0.5)

    assert (second / "cgroup.subtree_control").read_text() == "+cpu"


def test_a_machine_that_does_not_pass_the_cpu_on_is_explained(second):
    """As in a container: what would help is said, to those who ask for a quota."""
    (second / "cgroup.subtree_control").unlink()
    make_group(group := second / "evenstep-lab-x-h0")
    set_cpus(group, None)
    with pytest.raises(LabUnavailable, match="Run on the machine itself"):
        set_cpus(group, 0.5)


def test_a_group_goes_with_its_members(tmp_path, monkeypatch):
    """They are killed, and killed again until the folder can go; one that is gone is no matter."""
    group, killed = tmp_path / "group", []
    group.mkdir()
    (group / "cgroup.procs").write_text("12\n34\n")

    def kill(pid, number):
        killed.append(pid)
        (group / "cgroup.procs").unlink(missing_ok=True)  # the kernel's own go with the folder
        raise ProcessLookupError

    monkeypatch.setattr("os.kill", kill)
    remove_group(group)
    remove_group(group)

    assert killed == [12, 34]
    assert not group.exists()


def test_the_process_itself_is_never_killed(tmp_path, monkeypatch):
    """Somebody may clean up from inside; the group stays, and it is said."""
    monkeypatch.setattr("os.kill", pytest.fail)
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n")
    with pytest.raises(OSError, match="not empty"):
        remove_group(tmp_path)
    assert members(tmp_path) == [os.getpid()]
