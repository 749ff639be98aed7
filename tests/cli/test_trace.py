"""A recorded run opens in Perfetto: the file keeps to the format, and says what was measured."""

import json
from collections import defaultdict

import pytest
from typer.testing import CliRunner

from evenstep.events import (
    MeasurementRejected,
    Rebalanced,
    RunEnded,
    RunStarted,
    StepMeasured,
    StepsAccounted,
    WaitingDiagnosed,
    to_record,
)

from . import app

WORLD_SIZE = 2
NOTHING = (0.0,) * WORLD_SIZE


def measured(step, sizes=(6, 2)):
    """0.2 s of the slower one, of which the faster one waits a half; 0.01 s for input."""
    times = (0.1, 0.2), (0.01, 0.01), (0.1, 0.0)
    return StepMeasured(step, 0, sizes, *times, 0.2, 0.25, None, None, None)


def accounted(step, num_steps=1):
    """Steps that take 0.3 s on each rank, rank 0 waits for 0.1 s of each."""
    each = {
        "wall_s": (0.3, 0.3),
        "input_s": (0.05, 0.05),
        "forward_s": (0.05, 0.1),
        "backward_s": (0.05, 0.1),
        "communication_s": (0.04, 0.04),
        "waiting_s": (0.1, 0.0),
        "optimizer_s": (0.01, 0.01),
    }
    spent = {name: tuple(num_steps * one for one in seconds) for name, seconds in each.items()}
    rest = dict.fromkeys(("evaluation_s", "checkpoint_s", "rest_s"), NOTHING)
    return StepsAccounted(step, num_steps, **spent, **rest)


STARTED = RunStarted(WORLD_SIZE, 8, 5, "Auto()", ("node1", "node2"), ("cpu", "cuda:0"))
RUN = [
    STARTED,
    measured(0, (4, 4)),
    Rebalanced(1, 1, (6, 2), "rank 1 is slow"),
    accounted(0),
    measured(1),
    measured(2),
    accounted(2, 2),
    WaitingDiagnosed(2, 2, 0.3, 0.17, 0.9, ("input",), (1,), (0.1,), ("5 ms",), ("do",)),
    measured(3),
    MeasurementRejected(4, 1, "NaN"),
    RunEnded(4),
]


def run(folder, told=RUN):
    """Write events and return their folder."""
    records = [{"event": "Schema", "version": 1}, *map(to_record, told)]
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def traced(folder, *options):
    """Return what the command wrote, checked by the format."""
    done = CliRunner().invoke(app, ["trace", str(folder), *options])
    assert done.exit_code == 0, done.output
    assert "ui.perfetto.dev" in done.output
    whole = json.loads((folder / "trace.json").read_text())
    check(whole)
    return whole


FIELDS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ph", "ts", "pid", "tid", "s", "args"},
    "C": {"name", "cat", "ph", "ts", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}
NAMES = {"process_name": str, "thread_name": str, "process_sort_index": int} | {
    "thread_sort_index": int
}


def check(whole):
    """Assert what the Trace Event Format asks for, and that no slices of a thread overlap."""
    assert whole["displayTimeUnit"] in ("ms", "ns")
    assert all(type(value) is str for value in whole["otherData"].values())
    ends = defaultdict(float)
    for event in whole["traceEvents"]:
        assert event.keys() == FIELDS[event["ph"]]
        assert type(event["name"]) is str
        assert type(event["pid"]) is type(event["tid"]) is int
        assert event["ph"] == "M" or event["ts"] >= 0
        match event["ph"]:
            case "M":
                ((key, value),) = event["args"].items()
                assert type(value) is NAMES[event["name"]]
                assert key == ("sort_index" if "sort" in event["name"] else "name")
            case "C":
                assert all(type(value) in (int, float) for value in event["args"].values())
            case "i":
                assert event["s"] in ("g", "p", "t")
            case "X":
                thread = event["pid"], event["tid"]
                assert event["dur"] > 0
                assert event["ts"] >= ends[thread] - 0.002  # microseconds, rounded to thousandths
                ends[thread] = event["ts"] + event["dur"]


def kind(whole, ph, pid=None):
    """The events of one kind, of a rank where it is given."""
    return [e for e in whole["traceEvents"] if e["ph"] == ph and pid in (None, e["pid"])]


def slices(whole, rank):
    """Phase, step, begin and length in ms of all slices of a rank."""
    return [
        (e["name"], e["args"]["step"], round(e["ts"] / 1e3), round(e["dur"] / 1e3))
        for e in kind(whole, "X", rank)
    ]


def test_ranks_are_processes_and_phases_are_threads(tmp_path):
    """One after the other within a step, which all ranks begin together."""
    whole = traced(run(tmp_path))
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in kind(whole, "M") if "read_n" in e["name"]
    }
    labels = [e["args"]["name"] for e in kind(whole, "M") if e["name"] == "process_name"]

    assert labels == ["rank 0 (node1, cpu)", "rank 1 (node2, cuda:0)"]
    assert all(threads[e["pid"], e["tid"]] == e["name"] for e in kind(whole, "X"))
    assert slices(whole, 0)[:6] == [
        ("input", "0", 0, 50),
        ("forward", "0", 50, 50),
        ("backward", "0", 100, 50),
        ("waiting", "0", 150, 100),
        ("communication", "0", 250, 40),
        ("optimizer", "0", 290, 10),
    ]
    assert slices(whole, 1)[0:5:4] == [("input", "0", 0, 50), ("optimizer", "0", 290, 10)]
    assert "not compared" in whole["otherData"]["alignment"]


def test_short_steps_that_were_told_together_are_drawn_together(tmp_path):
    """And what was measured alone, such as the last step, as far as that goes."""
    mine = slices(traced(run(tmp_path)), 0)

    assert ("waiting", "1-2", 600, 200) in mine
    assert mine[-3:] == [
        ("input", "3", 900, 10),
        ("computing", "3", 910, 100),
        ("waiting", "3", 1010, 100),
    ]


def test_plans_causes_and_faults_are_instants(tmp_path):
    """At the step that each is of; on its rank, if it has one."""
    whole = traced(run(tmp_path))
    found = {e["name"]: (round(e["ts"] / 1e3), e["pid"], e["s"]) for e in kind(whole, "i")}

    assert found["plan 1"] == (300, 0, "g")
    assert found["rank 1: input"][0] >= 300
    assert found["MeasurementRejected"] == (1110, 1, "p")
    assert found["RunStarted"] == (0, 0, "g")
    (plan,) = (e for e in kind(whole, "i") if e["name"] == "plan 1")
    assert plan["args"]["reason"] == "rank 1 is slow"


def test_batch_sizes_are_counters(tmp_path):
    """Of every step, those told together included."""
    counters = kind(traced(run(tmp_path)), "C", 1)
    sizes = [(round(e["ts"] / 1e3), e["args"]["samples"]) for e in counters]

    assert sizes == [(0, 4), (300, 2), (600, 2), (900, 2)]


@pytest.mark.parametrize(
    ("steps", "drawn"),
    [("1-2", {"1-2"}), ("3", {"3"}), ("2-", {"1-2", "3"}), ("0-0", {"0"})],
)
def test_some_steps_alone_are_drawn(tmp_path, steps, drawn):
    """From the beginning of the time axis on, with the plans of those steps alone."""
    whole = traced(run(tmp_path), "--steps", steps)

    assert {step for _, step, _, _ in slices(whole, 0)} == drawn
    assert min(e["ts"] for e in kind(whole, "X")) == 0
    plans = {e["name"] for e in kind(whole, "i") if e["name"].startswith("plan")}
    assert plans == ({"plan 1"} if steps == "1-2" else set())


def test_a_run_that_began_anew_goes_on_behind(tmp_path):
    """From an earlier step, perhaps: it was resumed from a checkpoint."""
    whole = traced(run(tmp_path, [*RUN, STARTED, measured(2), accounted(2)]))

    assert slices(whole, 0)[-6:][0] == ("input", "2", 1110, 50)


def test_a_hundred_thousand_steps_are_not_held(tmp_path):
    """One in memory at a time, though accounts lag behind; those without any are drawn at last."""
    told = [STARTED, *[measured(step) for step in range(3000)]]
    told[1500:1500] = [accounted(1400)]
    whole = traced(run(tmp_path, told))

    assert len(slices(whole, 0)) == 3 * 2999 + 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "7-3"], "must name steps, got '7-3'"),
        (["--steps", "some"], "must name steps"),
        (["--steps", "9" * 5000], "must name steps"),
        (["--output", "no/such/folder"], "`evenstep trace --output` must be a file to write, got"),
        (["--output", "."], "`evenstep trace --output` must be a file to write, got"),
        (["--steps", "100-"], "holds no step"),
        (["--output", "events.jsonl"], "must name another file than the events"),
    ],
)
def test_what_cannot_be_drawn_is_answered(tmp_path, monkeypatch, options, words):
    """With what would do."""
    monkeypatch.chdir(run(tmp_path))
    done = CliRunner().invoke(app, ["trace", ".", *options])

    assert done.exit_code in (1, 2)
    assert words in " ".join(done.output.split())


@pytest.mark.parametrize("name", [".", "gone", "gone/run", "x" * 300])
def test_a_run_that_cannot_be_read_is_named(tmp_path, monkeypatch, name):
    """And no file is left there."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["trace", name])

    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "`evenstep trace RUN` must name a run that can be read, got" in said
    assert "Give what `Runtime(run_dir=...)` was given." in said
    assert not list(tmp_path.iterdir())


def test_an_older_trace_stays_where_a_run_cannot_be_read_to_its_end(tmp_path):
    """As of a newer evenstep from some line on: half a trace opens nowhere."""
    traced(run(tmp_path))
    before = (tmp_path / "trace.json").read_bytes()
    with (tmp_path / "events.jsonl").open("a") as events:
        events.write('{"event": "Schema", "version": 99}\n')
    done = CliRunner().invoke(app, ["trace", str(tmp_path)])

    assert done.exit_code == 2
    assert "Upgrade evenstep" in done.output
    assert (tmp_path / "trace.json").read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {"events.jsonl", "trace.json"}


def test_an_account_of_no_steps_is_left_out(tmp_path):
    """It is damaged; its step is drawn as it was measured, with its plan."""
    plan = Rebalanced(1, 1, (6, 2), "rank 1 is slow")
    told = [STARTED, measured(0), plan, accounted(1, num_steps=0), measured(1)]
    whole = traced(run(tmp_path, told))

    assert [step for _, step, _, _ in slices(whole, 0)] == ["0"] * 3 + ["1"] * 3
    assert "plan 1" in {event["name"] for event in kind(whole, "i")}
