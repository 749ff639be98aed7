"""Events reach files and people; a sink that raises, blocks or is slow costs its own events."""

import io
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import fields
from typing import get_args

import pytest

from evenstep import events
from evenstep._telemetry import (
    EventFile,
    FaultLog,
    JsonLines,
    Outlet,
    ProgressLine,
    close_all,
)
from evenstep.events import (
    BalancingStopped,
    ClaimsSwitched,
    LossNotFinite,
    MeasurementRejected,
    PolicyFailed,
    PolicySlow,
    Rebalanced,
    RunEnded,
    SharesPlanned,
    WorkerUnhelpful,
    to_record,
)

from .steps import measured

REBALANCED = Rebalanced(step=3, plan_epoch=1, batch_size=(40, 24), reason="rank 1 is slow")


def test_what_is_written_can_be_read_back(tmp_path):
    """Every event in order, with its name and all its fields."""
    sink = JsonLines(tmp_path / "run" / "events.jsonl")
    for event in (REBALANCED, measured(4), RunEnded(num_steps=5)):
        sink(event)
    sink.close()

    assert list(EventFile(tmp_path / "run")) == [REBALANCED, measured(4), RunEnded(num_steps=5)]


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    """A killed run can still be read, up to its last whole line."""
    path = tmp_path / "events.jsonl"
    sink = JsonLines(path)
    sink(REBALANCED)
    sink.close()
    path.write_text(path.read_text() + '{"event": "StepMea')

    assert list(EventFile(path)) == [REBALANCED]


def test_a_resumed_run_goes_on_after_a_line_that_was_cut_short(tmp_path):
    """What was left of it is taken off, and the file stays readable."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "RunEnded", "num_steps": 3}\n{"event": "StepMea')
    sink = JsonLines(path)
    sink(REBALANCED)
    sink.close()

    assert list(EventFile(path)) == [RunEnded(num_steps=3), REBALANCED]


def test_a_file_from_the_future_is_refused(tmp_path):
    """Rather than misread."""
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"event": "Schema", "version": events.SCHEMA_VERSION + 1}) + "\n")

    with pytest.raises(ValueError, match="Upgrade evenstep"):
        list(EventFile(path))


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (ClaimsSwitched(16, on=True), "step 16: from now on, workers begin with a part"),
        (ClaimsSwitched(32, on=False), "step 32: from now on, workers compute their planned batch"),
        (
            SharesPlanned(
                5, 1, (524288, 524288, 0), 1.5, 2.0, "shares: 1.5 s against 2 s of a ring"
            ),
            "step 5: from now on, each rank sums its share of the gradients, 50 50 0 %",
        ),
        (
            SharesPlanned(9, 2, None, 2.0, 2.0, "plain all-reduce: why"),
            "step 9: from now on, gradients are summed by plain all-reduce: why",
        ),
        (
            SharesPlanned(5, 1, (65536,) * 8 + (32768,) * 16, 1.5, 2.0, "shares"),
            "step 5: from now on, 24 ranks sum shares of the gradients (shares)",
        ),
        (
            WorkerUnhelpful(100, 2, 0.61, 0.48),
            "rank 2 costs more than it brings: steps of 0.61 s with all, 0.48 s with those",
        ),
        (
            BalancingStopped(7, 0, "internal fault of evenstep (KeyError: 3)", "Traceback ..."),
            "step 7: balancing is off for the rest of the run, with equal batch sizes: internal "
            "fault of evenstep (KeyError: 3) on rank 0\n",
        ),
    ],
)
def test_what_a_person_has_to_know_is_said_at_once(event, words):
    """Between two lines, in whole sentences."""
    stream = io.StringIO()

    ProgressLine(stream, 50)(event)

    assert words in stream.getvalue()


def test_every_event_is_plain_and_documented():
    """Each field is named in the docstring; each record is JSON."""
    for kind in get_args(events.Event):
        for field in fields(kind):
            assert f"{field.name}:" in kind.__doc__, (kind, field.name)
    json.dumps(to_record(measured(0)))


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path):
    """A real one, where this may be mounted; up to the last whole line, the file can be read."""
    with tiny_disk(tmp_path / "disk") as disk:
        sink = JsonLines(disk / "events.jsonl")
        with pytest.raises(OSError, match="No space left on device"):
            fill(sink)
        sink.close()  # has nothing left to write, and does not raise

        steps = [event.step for event in EventFile(disk)]

    assert len(steps) > 10
    assert steps == list(range(len(steps)))


def fill(sink):
    for step in range(10_000):
        sink(measured(step))


@contextmanager
def tiny_disk(folder):
    """A file system of 64 KiB; skips the test where one cannot be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_file_that_was_deleted_is_an_error(tmp_path):
    """Written to, it would go nowhere without a word."""
    sink = JsonLines(tmp_path / "run" / "events.jsonl")
    sink(REBALANCED)
    shutil.rmtree(tmp_path / "run")

    with pytest.raises(FileNotFoundError, match="the file was deleted"):
        sink(REBALANCED)
    sink.close()


def test_reopening_takes_off_a_cut_line_and_nothing_else(tmp_path):
    """Longer than one look from the end, and whether there was a whole line before it or not."""
    path = tmp_path / "events.jsonl"
    whole = "".join(json.dumps({"event": "x", "n": n, "text": "y" * 100}) + "\n" for n in range(9))
    for kept in (whole, ""):
        path.write_text(kept + "z" * 200_000)
        JsonLines(path).close()

        text = path.read_text()
        assert text.startswith(kept + '{"event": "Schema"')
        assert "z" not in text[len(kept) :].replace("Schema", "")


def test_a_link_is_not_written_through(tmp_path):
    """In a folder that others can write to, it may lead to any file of the user's."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "events.jsonl").symlink_to(mine)

    with pytest.raises(OSError, match="symbolic link, which is not followed: remove it"):
        JsonLines(tmp_path / "events.jsonl")

    assert mine.read_text() == "precious"


WRITER = """
import os, sys
from pathlib import Path
from evenstep._telemetry import JsonLines
sink = JsonLines(Path(sys.argv[1]))
if os.fork():
    print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="locks are those of POSIX")
def test_two_runs_at_a_time_do_not_share_a_file(tmp_path):
    """The second is refused; after a kill the next one goes on, as loader workers hold nothing."""
    path = tmp_path / "events.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as first:
        assert first.stdout.readline() == "open\n"
        with pytest.raises(OSError, match="another run writes to "):
            JsonLines(path)
        first.kill()
        first.wait()
        second = JsonLines(path)  # while the child of the first one lives
        second(REBALANCED)
        second.close()

    assert list(EventFile(tmp_path)) == [REBALANCED]


@pytest.fixture
def told(caplog):
    """What a person is told, as texts."""
    caplog.set_level(logging.WARNING, logger="evenstep")
    return lambda: [record.getMessage() for record in caplog.records]


def test_events_arrive_in_order_and_all_of_them(told):
    """Those from before the start too, and the sink is finished after the last."""
    heard = []
    outlet = Outlet(heard.append, finish=lambda: heard.append("end"))
    outlet(RunEnded(0))
    outlet.start()
    for number in range(1, 100):
        outlet(RunEnded(number))

    assert outlet.close()
    assert heard == [*map(RunEnded, range(100)), "end"]
    assert told() == []


def test_a_sink_runs_on_a_thread_of_its_own():
    """And that thread is at its end after the close."""
    threads = []
    outlet = Outlet(lambda event: threads.append(threading.current_thread()))
    outlet.start()
    outlet(RunEnded(0))
    outlet.close()

    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()


def test_a_sink_that_raises_is_told_of_once_and_gets_no_more(told):
    """The rest of the events are dropped quietly, and the thread ends cleanly."""
    calls = []

    def broken(event):
        calls.append(event)
        raise KeyError("a mistake of the user's")

    outlet = Outlet(broken, name="mine", finish=lambda: calls.append("end"))
    outlet.start()
    for number in range(5):
        outlet(RunEnded(number))

    assert outlet.close()
    assert calls == [RunEnded(0), "end"]
    assert len(told()) == 1
    assert "The telemetry sink mine failed on RunEnded (KeyError" in told()[0]
    assert "training continues" in told()[0]


def test_a_sink_that_wants_to_exit_is_told_of_too(told):
    """It ends its own thread alone, and that without a word."""

    def leaving(event):
        sys.exit("enough")

    outlet = Outlet(leaving, name="mine")
    outlet.start()
    outlet(RunEnded(0))

    assert outlet.close()
    assert "The telemetry sink mine failed on RunEnded (SystemExit: enough)" in told()[0]


def test_a_sink_that_blocks_drops_what_is_too_much_and_says_so_once(told):
    """The giver never waits, nor does the close for longer than it was told to."""
    gate, entered = threading.Event(), threading.Event()

    def blocked(event):
        entered.set()
        gate.wait()

    outlet = Outlet(blocked, name="stuck", capacity=3)
    outlet.start()
    outlet(RunEnded(0))
    assert entered.wait(5)
    for number in range(1, 11):
        outlet(RunEnded(number))
    thread = outlet._thread
    done = outlet.close(within_s=0.05)
    gate.set()
    thread.join(5)

    assert not done
    assert outlet.num_dropped == 7
    assert len(told()) == 2
    assert "stuck is too slow: 3 events wait for it" in told()[0]
    assert "stuck missed 10 events and did not end within 0.05 s" in told()[1]


def test_a_slow_sink_gets_the_rest_at_the_close(told):
    """What was dropped is counted at the end."""
    gate, entered, heard = threading.Event(), threading.Event(), []

    def slow(event):
        entered.set()
        gate.wait(5)
        heard.append(event)

    outlet = Outlet(slow, name="slow", capacity=2)
    outlet.start()
    outlet(RunEnded(0))
    assert entered.wait(5)
    for number in range(1, 6):
        outlet(RunEnded(number))
    gate.set()

    assert outlet.close(within_s=5)
    assert heard == [RunEnded(0), RunEnded(1), RunEnded(2)]
    assert told()[1] == "The telemetry sink slow missed 3 events."


def test_several_are_closed_within_one_limit(told):
    """One that blocks takes no time from those behind it beyond the limit."""
    gate, heard = threading.Event(), []
    stuck, fine = Outlet(lambda event: gate.wait(), name="stuck"), Outlet(heard.append)
    for outlet in (stuck, fine):
        outlet.start()
        outlet(RunEnded(1))
    threads = [stuck._thread, fine._thread]

    close_all([stuck, fine], within_s=0.5)
    gate.set()
    for thread in threads:
        thread.join(5)

    assert heard == [RunEnded(1)]
    assert told() == ["The telemetry sink stuck missed 0 events and did not end within 0.5 s."]


def test_a_fault_is_told_to_a_person_once_for_each_who_has_it(told):
    """A policy that fails at every step is one line, not as many as there are steps."""
    log = FaultLog()
    for step in range(3):
        log(PolicyFailed(step, "ValueError: no", "Mine"))
        log(PolicySlow(step, 2.0, 38.0))
        log(MeasurementRejected(step, 1, "compute_s is nan"))
        log(MeasurementRejected(step, 2, "compute_s is nan"))
        log(LossNotFinite(step, (1, 2)))
        log(RunEnded(step))

    assert [text.partition(" Training")[0] for text in told()] == [
        "Step 0: the policy Mine failed, and the last good plan stays (ValueError: no).",
        "Step 0: the policy took 2.0 s to decide, for the second time in a row, and all "
        "ranks waited. It is called again after 38 s; until then the sizes stay.",
        "Step 0: rank 1 sent an invalid measurement, and the plan stays: compute_s is nan.",
        "Step 0: rank 2 sent an invalid measurement, and the plan stays: compute_s is nan.",
        "From step 0 on losses are NaN or infinite, first on rank 1 and rank 2: check the "
        "batch and the loss there. Averaged gradients spread it to the parameters of all ranks for "
        "good: restart from a checkpoint of an earlier step.",
    ]
