"""However a lab ends, nothing of it is left, and nothing of others goes."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evenstep.lab import Host, Lab, clean
from evenstep.lab._built import Built, read_states, start_of
from evenstep.lab._cpu_groups import find_cpu_groups, members_file
from evenstep.lab._links import Namespace

from .remains import RUN, left_of, processes_of, processes_on_hosts, running

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


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.usefixtures("a_lab_can_be_made")
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


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.usefixtures("a_lab_can_be_made")
def test_an_error_in_the_middle_leaves_nothing():
    """The error comes out as it was. Nor does a process that left its host's group stay."""
    seen = []
    cpu = find_cpu_groups(Path("/proc/self/mountinfo").read_text())

    def fail():
        with Lab([Host()]) as lab:
            start_stray(lab, leave="" if cpu is None else str(members_file(cpu)))
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


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.usefixtures("a_lab_can_be_made")
def test_a_lab_that_cannot_be_made_leaves_nothing():
    """Its first host is there when the second one fails."""
    broken = Broken()
    with pytest.raises(OSError, match="no such link"), Lab([Host(cpus=0.5), broken]):
        pytest.fail("made all the same")

    (run_id,) = {host.parent.name for host in broken.before if host.name == "h1"}
    assert left_of(run_id) == []


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.usefixtures("a_lab_can_be_made")
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


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.usefixtures("a_lab_can_be_made")
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


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.usefixtures("a_lab_can_be_made")
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
        assert run_id not in {lab.run_id for lab, _ in clean()}
    finally:
        foreign.remove()
        group.parent.is_dir() and group.rmdir()


def state_of(run, **changes):
    """A lab of this very process, whose groups are where none can be."""
    fields = {"run_id": "0a1b2c3d", "pid": os.getpid(), "started": start_of(os.getpid())}
    return Built(**{**fields, "num_hosts": 2, "group_root": None, "run": run, **changes})


def test_a_state_is_read_as_it_was_written(tmp_path):
    """By a process that was not there when the lab was made."""
    run = tmp_path / "evenstep-lab"
    state = state_of(run, group_root="/sys/fs/cgroup/cpu")
    state.write()

    assert read_states(run) == [state]
    assert [file.name for file in run.iterdir()] == ["0a1b2c3d.json"]
    assert state.group(1).name == "evenstep-lab-0a1b2c3d-h1"
    state.remove()
    assert read_states(run) == []


def test_a_process_is_told_from_a_later_one_of_its_number(tmp_path):
    """By when it began; one that ended is gone, whether somebody asked for its code or not."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state = state_of(tmp_path, pid=process.pid, started=start_of(process.pid))
    assert state.is_running()
    assert not replace(state, started=state.started - 1).is_running()
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has asked yet

    assert not state.is_running()
    process.wait()
    assert not state.is_running()


def test_a_running_lab_is_left_alone(tmp_path):
    """Its process is there."""
    run = tmp_path / "evenstep-lab"
    state_of(run).write()

    assert clean(run) == ((state_of(run), None),)
    assert read_states(run) == [state_of(run)]


def test_what_a_lab_got_to_is_removed(tmp_path):
    """However far that was: a group, but no namespace yet, say. And nothing beside it."""
    run, groups = tmp_path / "evenstep-lab", tmp_path / "cpu"
    for name in ("evenstep-lab-0a1b2c3d-h0", "evenstep-lab-ffffffff-h0", "evenstep-lab"):
        (groups / name).mkdir(parents=True)
    state = state_of(run, started=0, group_root=str(groups))
    state.write()
    state.folder.mkdir()
    (state.folder / "h0").touch()  # made, but nothing mounted on it

    assert clean(run) == ((state, 0),)
    assert not run.exists()
    assert sorted(path.name for path in groups.iterdir()) == [
        "evenstep-lab",
        "evenstep-lab-ffffffff-h0",
    ]


def test_where_no_lab_ever_was_nothing_is_done(tmp_path):
    """Nor made."""
    assert clean(tmp_path / "evenstep-lab") == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({"run_id": "0a1b2c3d"}),
        *(
            json.dumps(
                {
                    "run_id": "0a1b2c3d",
                    "pid": 1,
                    "started": 0,
                    "num_hosts": 1,
                    "group_root": None,
                }
                | wrong
            )
            for wrong in (
                {"run_id": "../../etc"},
                {"run_id": 7},
                {"run_id": "another"},
                {"num_hosts": "2"},
                {"group_root": "here"},
                {"group_root": 5},
                {"colour": "red"},
            )
        ),
    ],
)
def test_what_no_lab_wrote_is_not_acted_upon(tmp_path, content):
    """It might lead anywhere: it is named, and nothing is removed."""
    file = tmp_path / "0a1b2c3d.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="not what a lab writes") as caught:
        clean(tmp_path)

    assert str(file) in str(caught.value)
    assert file.read_text() == content


@pytest.mark.parametrize("name", ["", ".", "..", "a b"])
def test_a_name_that_leads_elsewhere_is_not_followed(tmp_path, name):
    """Though the file is called so, too."""
    fields = {"run_id": name, "pid": 1, "started": 0, "num_hosts": 1, "group_root": None}
    (tmp_path / f"{name}.json").write_text(json.dumps(fields))

    with pytest.raises(ValueError, match="not what a lab writes"):
        clean(tmp_path)


def test_a_file_without_a_namespace_holds_no_processes(tmp_path):
    """Neither those of the machine nor any others are taken for its own."""
    (tmp_path / "h0").touch()
    for namespace in (Namespace(tmp_path / "h0"), Namespace(tmp_path / "missing")):
        assert namespace.processes() == []
        assert namespace.kill() == 0
        namespace.remove()

    assert list(tmp_path.iterdir()) == []
