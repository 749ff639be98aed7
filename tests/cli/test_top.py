"""``evenstep top`` shows a run, or says what it was given."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evenstep.events import Rebalanced, RunStarted, StepMeasured, to_record

from . import app

pty = pytest.importorskip("pty", reason="terminals are played by pty, which Windows lacks")


def top(*arguments, stdin=None):
    return CliRunner().invoke(app, ["top", *map(str, arguments)], input=stdin)


@pytest.fixture
def run(tmp_path):
    """Two workers and three steps."""
    told = [RunStarted(2, 64, 10, "Auto()", ("a", "b"), ("cpu", "cuda:0 NVIDIA H200"))]
    told += [Rebalanced(0, 0, (40, 24), "equal")]
    told += [
        StepMeasured(step, 0, (40, 24), (0.2, 0.1), (0.0, 0.0), (0.0, 0.1), 0.2, 0.25, 0.3, None, 1)
        for step in range(3)
    ]
    records = [{"event": "Schema", "version": 1}, *map(to_record, told)]
    file = tmp_path / "mine" / "events.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_one_view_is_plain_text(run):
    """By folder and file, and where the output is no terminal anyway."""
    pages = [top(run.parent, "--once").output, top(run, "--once").output, top(run.parent).output]

    assert pages[0] == pages[2]
    for page in pages:
        assert "2 workers, 64 samples a step" in page
        assert "step 2 (3 of 10 of its epoch" in page
        assert "\x1b" not in page


def test_standard_input_is_a_run_too(run):
    """``ssh host cat run/events.jsonl | evenstep top -``."""
    done = subprocess.run(
        [sys.executable, "-m", "evenstep.cli", "top", "-"],
        input=run.read_bytes(),
        capture_output=True,
        check=True,
    )

    assert "step 2 (3 of 10 of its epoch" in done.stdout.decode()


def test_the_line_for_another_machine_begins_with_the_newest_start(run):
    """As the page has it: with the ranks of now, where more of them trained before."""
    page = (Path(__file__).parents[2] / "docs" / "follow.md").read_text("utf-8")
    (line,) = re.findall(r"^\$ ssh node0 '(.+)' \| evenstep top -$", page, re.MULTILINE)
    before = [RunStarted(1, 64, 10, "Auto()", ("c",), ("cpu",))]
    before += [StepMeasured(3, 0, (64,), (0.2,), (0.0,), (0.0,), 0.2, 0.0, None, None, 1)]
    older = "".join(json.dumps(to_record(event)) + "\n" for event in before)
    schema, start, _, *steps = run.read_text().splitlines(keepends=True)
    run.write_text(schema + older + schema + start + "".join(600 * steps))
    line = line.replace("runs/first", str(run.parent)).replace(" -F ", " ")
    shell = ["sh", "-c", f"({line}) | {sys.executable} -m evenstep.cli top -"]
    shown = subprocess.run(shell, capture_output=True, check=True).stdout.decode()

    assert "2 workers, 64 samples a step" in shown
    assert "step 2 " in shown
    assert "left out" not in shown


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "name a file that can be read"),
        (b"\x1f\x8b" + b"\xab\n" * 9, "must hold the events of a run"),
        (b'{"event": "Schema", "version": 9}\n', "Upgrade evenstep"),
    ],
    ids=["missing", "packed", "newer"],
)
def test_what_is_no_run_is_an_error(tmp_path, content, words):
    """With its remedy, and code 2."""
    if content is not None:
        (tmp_path / "events.jsonl").write_bytes(content)
    result = top(tmp_path, "--once")

    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize("pace", ["0.001", "0", "-1", "nan", "inf", "1e308"])
def test_a_pace_that_no_terminal_keeps_is_refused(run, pace):
    """Rather than a processor kept busy, or a view that never changes."""
    result = top(run, "--refresh", pace)

    assert result.exit_code == 2
    got = f"`evenstep top --refresh` must be from 0.1 to 3,600, got {float(pace)}."
    assert got in " ".join(result.output.split())


def test_signs_that_the_output_lacks_end_no_command(run, tmp_path):
    """Bars in ASCII, and bytes of a name that are no text."""
    odd = os.fsencode(tmp_path) + b"/o\xffdd"
    os.rename(run.parent, odd)
    for asked in (["top", odd, "--once"], ["simulate", "--trace", odd]):
        done = subprocess.run(
            [sys.executable, "-m", "evenstep.cli", *asked],
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert re.search(rb"o[? ]dd", done.stdout)


def test_what_has_no_end_is_refused():
    """Rather than read for ever."""
    result = top("/dev/zero", "--once")

    assert result.exit_code == 2
    assert "`evenstep top RUN` must be a file or a pipe, got /dev/zero" in result.output


def _own_terminal():
    """Have keys reach a process; Ctrl-C too, where what started the tests ignores it."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_in_a_terminal_it_ends_calmly_and_leaves_the_last_view(run, key):
    """With what was typed, code 0 and the terminal as it was."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "evenstep.cli", "top", str(run.parent)]
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        preexec_fn=_own_terminal,
    )  # fmt: skip
    os.close(follower)
    seen = io.BytesIO()
    while b"step 2" not in seen.getvalue():
        seen.write(os.read(leader, 1 << 16))
    os.write(leader, key)
    try:
        while piece := os.read(leader, 1 << 16):
            seen.write(piece)
    except OSError:  # the other end is closed
        pass

    assert process.wait() == 0
    after = seen.getvalue().partition(b"\x1b[?1049l")[2]  # back from the alternate screen
    assert b"step 2" in after
    assert b"Traceback" not in after
    os.close(leader)


def test_standard_input_is_followed_in_a_terminal(run):
    """``ssh host tail -F events.jsonl | evenstep top -``: there is no keyboard to read a q from."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "evenstep.cli", "top", "-", "--refresh", "0.1"],
        stdin=subprocess.PIPE, stdout=follower, stderr=follower,
    )  # fmt: skip
    os.close(follower)
    process.stdin.write(run.read_bytes())
    process.stdin.flush()
    seen = io.BytesIO()
    try:
        while piece := os.read(leader, 1 << 16):
            seen.write(piece)
            if b"step 2" in seen.getvalue():  # while the stream goes on
                process.stdin.close()
    except OSError:  # the other end is closed
        pass

    assert process.wait() == 0, seen.getvalue().decode()
    assert b"step 2" in seen.getvalue().partition(b"\x1b[?1049l")[2]
    os.close(leader)
