"""What a host may use: values, checked."""

import errno
import math
from pathlib import Path
from unittest.mock import Mock

import pytest

from evenstep.lab import Host, Lab, LabUnavailable
from evenstep.lab._cpu_groups import CpuGroupsV2
from evenstep.lab._host import Machine, Rate, check_cores, check_machine, check_torch
from evenstep.lab._links import Namespace, set_rate
from tests.form.test_surface import run

ALL = frozenset({"pyroute2", "torch"})


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
    ("machine", "words"),
    [
        (Machine("Darwin", False, ALL, 8), "this is Darwin. Run it on Linux"),
        (Machine("Windows", False, ALL, 8), "this is Windows. Run it on Linux"),
        (Machine("", False, ALL, 8), "an unknown system"),
        (Machine("Linux", False, ALL, 8), "takes root. Run it with `sudo`"),
        (Machine("Linux", True, frozenset(), 8), r"pip install .*\[lab\]"),
    ],
)
def test_where_no_lab_can_be_made_the_remedy_is_said(machine, words):
    """Another system, another user, a missing package."""
    with pytest.raises(LabUnavailable, match=words):
        check_machine(machine)


def test_a_kernel_without_a_token_bucket_is_explained(monkeypatch):
    """As one without netem is."""

    def unknown(*_):
        raise OSError(errno.ENOENT, "netlink: no such kind")

    monkeypatch.setattr("evenstep.lab._links._on", unknown)
    with pytest.raises(LabUnavailable, match=r"`Host\(mbit=...\)` needs tbf.*modprobe sch_tbf"):
        set_rate(Namespace(Path("none")), "eth0", 5.0)


def test_control_groups_that_are_read_only_are_needed_for_quotas_alone(monkeypatch):
    """As those of most containers are. Links do without."""
    made = []
    groups = CpuGroupsV2(Path("groups"))
    monkeypatch.setattr("evenstep.lab._lab.check_machine", lambda _: None)
    monkeypatch.setattr("evenstep.lab._lab.find_cpu_groups", lambda _: groups)
    monkeypatch.setattr("evenstep.lab._lab.os.access", lambda *_: False)
    monkeypatch.setattr("evenstep.lab._lab.Built", lambda *_, **kept: made.append(kept) or Mock())
    with Lab([Host(mbit=5)]):
        assert made == [{"groups": None, "delay_ms": 0.0}]
    with pytest.raises(LabUnavailable, match="can be written to"), Lab([Host(cpus=0.5)]):
        pytest.fail("made all the same")


def test_torchrun_needs_torch():
    """The rest of a lab does not."""
    machine = Machine("Linux", True, frozenset({"pyroute2"}), 8)
    check_machine(machine)

    with pytest.raises(LabUnavailable, match=r"pip install .*\[torch\]"):
        check_torch(machine)


def test_importing_the_lab_loads_neither_torch_nor_pyroute2():
    """It can be imported wherever numpy is, and says what it needs when it is used."""
    loaded = run("import sys, evenstep.lab; print(*{name.split('.')[0] for name in sys.modules})")

    assert set(loaded.split()) & {"torch", "pyroute2", "typer", "rich", "asyncio"} == set()
