"""What labs write down, and what ``clean`` does about labs whose process is gone."""

import json
import os
import subprocess
import sys

import pytest

from evenstep.lab import clean
from evenstep.lab._built import State, read_states, start_of
from evenstep.lab._links import Namespace


def state_of(**changes):
    """A lab of this very process, whose groups are where none can be."""
    fields = {"run_id": "0a1b2c3d", "pid": os.getpid(), "started": start_of(os.getpid())}
    return State(**{**fields, "num_hosts": 2, "group_root": None, **changes})


def test_a_state_is_read_as_it_was_written(tmp_path):
    """By a process that was not there when the lab was made."""
    run = tmp_path / "evenstep-lab"
    state = state_of(group_root="/sys/fs/cgroup/cpu")
    state.write(run)

    assert read_states(run) == [state]
    assert [file.name for file in run.iterdir()] == ["0a1b2c3d.json"]
    assert state.group(1).name == "evenstep-lab-0a1b2c3d-h1"
    state.forget(run)
    assert read_states(run) == []


def test_a_process_is_told_from_a_later_one_of_its_number():
    """By when it began; one that ended is gone, whether somebody asked for its code or not."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state = state_of(pid=process.pid, started=start_of(process.pid))
    assert state.is_running()
    assert not state_of(pid=process.pid, started=state.started - 1).is_running()
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has asked yet

    assert not state.is_running()
    process.wait()
    assert not state.is_running()


def test_a_running_lab_is_left_alone(tmp_path):
    """Its process is there."""
    run = tmp_path / "evenstep-lab"
    state_of().write(run)
    (found,) = clean(run)

    assert found.is_running
    assert found.pid == os.getpid()
    assert read_states(run) == [state_of()]


def test_what_a_lab_got_to_is_removed(tmp_path):
    """However far that was: a group, but no namespace yet, say. And nothing beside it."""
    run, groups = tmp_path / "evenstep-lab", tmp_path / "cpu"
    for name in ("evenstep-lab-0a1b2c3d-h0", "evenstep-lab-ffffffff-h0", "evenstep-lab"):
        (groups / name).mkdir(parents=True)
    state = state_of(started=0, group_root=str(groups))
    state.write(run)
    state.folder(run).mkdir()
    (state.folder(run) / "h0").touch()  # made, but nothing mounted on it
    (found,) = clean(run)

    assert (found.is_running, found.num_killed, found.num_hosts) == (False, 0, 2)
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
