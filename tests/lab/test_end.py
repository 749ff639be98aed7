"""However a lab ends, nothing of it is left, and nothing of others goes. Needs root."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.lab import Host, Lab, clean
from evenstep.lab._cpu_groups import find_cpu_groups, members_file
from evenstep.lab._links import Namespace

from .remains import RUN, left_of, processes_of, processes_on_hosts, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.usefixtures("a_lab_can_be_made"),
]

# One that goes away from whoever started it.
STRAY = "import os, time\nif os.fork(): os._exit(0)\nos.setsid(); print(1, flush=True)\n"


def start_stray(lab, *, leave=""):
    """A process that its host's Popen knows nothing of, running by now, in a group of its choice.

    Its arguments name the lab, so that it is found when nothing else is left.
    """
    left = f"open({leave!r}, 'w').write(str(os.getpid()))\n" if leave else ""
    script = f"import os\n{left}{STRAY}time.sleep(600)  # /{lab.run_id}/"
    command = [sys.executable, "-S", "-c", script]
    with lab.start(0, command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
    assert process.returncode == 0


def test_a_lab_that_ends_leaves_nothing():
    """No file, mount, group, interface or process; in the middle of ``with`` it had them."""
    interfaces = socket.if_nameindex()
    with Lab([Host(mbit=20, cpus=0.5), Host()]) as lab:
        start_stray(lab)
        script = "echo; exec sleep 600"
        process = lab.start(1, ["sh", "-c", script], stdout=subprocess.PIPE)
        assert process.stdout.readline()
        there = left_of(lab.run_id)
        run_id = lab.run_id
        assert socket.if_nameindex() == interfaces  # not even meanwhile

    # A file, a folder, two groups, three mounts, the stray and the sleeper.
    assert len(there) >= 9
    assert left_of(run_id) == []
    assert process.returncode == -signal.SIGTERM
    process.stdout.close()
    assert socket.if_nameindex() == interfaces


def test_an_error_in_the_middle_leaves_nothing():
    """The error comes out as it was. Nor does a process that left its host's group stay."""
    seen = []
    cpu = find_cpu_groups(Path("/proc/self/mountinfo").read_text())

    def fail():
        with Lab([Host()]) as lab:
            start_stray(lab, leave="" if cpu is None else str(members_file(cpu.root)))
            seen.append(lab.run_id)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert left_of(*seen) == []


class Broken:
    """A host that gets no further than its link."""

    cpus = None

    def __init__(self):
        self.before = []

    @property
    def mbit(self):
        mine = [json.loads(state.read_text()) for state in RUN.glob("*.json")]
        names = [state["run_id"] for state in mine if state["pid"] == os.getpid()]
        self.before.extend(host for name in names for host in (RUN / name).glob("h*"))
        raise OSError("no such link")


def test_a_lab_that_cannot_be_made_leaves_nothing():
    """Its first host is there when the second one fails."""
    broken = Broken()
    with pytest.raises(OSError, match="no such link"), Lab([Host(cpus=0.5), broken]):
        pytest.fail("made all the same")

    (run_id,) = {host.parent.name for host in broken.before if host.name == "h1"}
    assert left_of(run_id) == []


def test_a_lab_can_be_made_again():
    """The value describes it; each ``with`` makes a new one."""
    lab = Lab([Host(mbit=20)])
    with lab:
        first = lab.run_id
    with lab:
        second = lab.run_id
        with pytest.raises(ValueError, match="one `with` at a time"), lab:
            pytest.fail("made inside itself")
        assert left_of(second) != []

    assert first != second
    assert left_of(first) == left_of(second) == []


def command_line(tmp_path, *options):
    """``evenstep lab`` in a process of its own, with agents on its hosts by now; and its run id."""
    (tmp_path / "script.py").write_text("import time; time.sleep(600)\n")
    command = [sys.executable, "-m", "evenstep.cli", "lab", *options]
    process = subprocess.Popen(
        [*command, "--", str(tmp_path / "script.py")], stderr=subprocess.PIPE, text=True
    )
    line = process.stderr.readline()
    assert line.startswith("lab "), line + process.stderr.read()
    run_id = line.split()[1].rstrip(":")
    while len(processes_on_hosts(run_id)) < 2:  # ends: pytest-timeout sees to it
        assert process.poll() is None
    return process, run_id


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_it(tmp_path, number):
    """Ctrl-C or a polite kill: everything goes, and a second one is no matter."""
    process, run_id = command_line(tmp_path, "--mbit", "20,20", "--cpus", "0.5")
    agents = processes_of(run_id)
    with process:
        process.send_signal(number)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "Stopped" in error
    assert left_of(run_id) == []
    assert running(agents) == []


def test_a_killed_lab_is_cleaned_up_and_others_are_not(tmp_path):
    """kill -9: the agents live on until ``--clean``. What is not a dead lab's stays as it is."""
    foreign = Namespace(tmp_path / "foreign")
    foreign.make()
    group = Path("/sys/fs/cgroup/cpu/evenstep-lab-of-somebody-else")
    process, run_id = command_line(tmp_path, "--mbit", "20,20", "--cpus", "0.5")
    try:
        group.parent.is_dir() and group.mkdir()
        with process, Lab([Host()]) as other:
            process.kill()
            process.wait()
            agents = processes_of(run_id)
            assert len(agents) >= 2
            sleeper = other.start(0, ["sleep", "600"])
            command = [sys.executable, "-m", "evenstep.cli", "lab", "--clean"]
            result = subprocess.run(command, text=True, capture_output=True)

            assert result.returncode == 0, result.stderr
            assert f"lab {run_id} of process {process.pid}, which is gone" in result.stdout
            assert f"lab {other.run_id} of process {os.getpid()} is running" in result.stdout
            assert left_of(run_id) == []
            assert running(agents) == []
            assert sleeper.poll() is None
            assert foreign.run(lambda: socket.if_nameindex()) == [(1, "lo")]
            assert group.is_dir() == group.parent.is_dir()
        assert run_id not in {each.run_id for each in clean()}
    finally:
        foreign.remove()
        group.parent.is_dir() and group.rmdir()
