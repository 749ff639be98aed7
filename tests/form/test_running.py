"""How the tests themselves are run: what is marked ``alone``, and what each took."""

import os
import subprocess
import sys

from .._durations import FILE
from .._snippets import ROOT

COUNTS = {"a": 10, "b": 60, "alone": 20}
SHARING = """
import os
import time
from pathlib import Path

import pytest

NOTES = Path(__file__).with_name("notes")


def note(what):
    with NOTES.open("a") as file:
        print(what, file=file, flush=True)


@pytest.mark.parametrize("number", range({count}))
{mark}
def test_it(number):
    note("begin {name}")
    os.sched_yield()
    time.sleep(0.01)  # long enough for another process to come in between
    note("end {name}")
"""


def run(folder):
    """Run the tests of a folder as `make test` does, on two processes."""
    # The settings of this tree, and its plugins of pytest, on tests that are not in it.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", folder]
    command += ["-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "no:cacheprovider"]
    command += ["--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    env = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_runs_beside_a_test_that_is_marked_alone(tmp_path):
    """Though it begins while others are left; and what each of them took is kept and printed."""
    for name, count in COUNTS.items():
        mark = "@pytest.mark.alone" if name == "alone" else ""
        code = SHARING.format(name=name, count=count, mark=mark)
        (tmp_path / f"test_{name}.py").write_text(code, "utf-8")
    said = run(tmp_path)
    notes = (tmp_path / "notes").read_text("utf-8").splitlines()
    alone = [place for place, note in enumerate(notes) if note == "begin alone"]
    lines = (tmp_path / FILE).read_text("utf-8").splitlines()

    assert len(alone) == 20
    assert all(notes[place + 1] == "end alone" for place in alone)
    assert len(lines) == 1 + 90
    assert all(f" {count} tests  test_{name}.py" in said for name, count in COUNTS.items())
