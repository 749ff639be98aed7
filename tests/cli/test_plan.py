"""``evenstep plan`` says what the pure part found, to people and to programs."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from evenstep import AffineTime
from evenstep.advice import advise, read_run
from evenstep.events import MemoryCapped, RunStarted, StepMeasured, to_record
from tests._snippets import ROOT

from . import app

TYPED = ["--speeds", "100,80,20", "--global-batch-size", "256"]
RUN_STARTED = to_record(RunStarted(2, 90, 100, "Auto()", ("a", "b"), ("cuda:0", "cpu")))


def measured(step, sizes, compute_s, wall_s=None):
    """What the events have of a step."""
    most_s, free = max(compute_s), (0.0, 0.0)
    idle_s = tuple(most_s - own_s for own_s in compute_s)
    return to_record(
        StepMeasured(step, 0, sizes, compute_s, free, idle_s, most_s, 0.1, None, None, wall_s)
    )


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def answer(*arguments):
    """What a program reads; stderr is no part of it."""
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def recorded(folder, *extra):
    """A run of two workers, one twice as fast, with a tenth of a second of overhead."""
    sizes = [[45, 45]] * 3 + [[60, 30]] * 5
    steps = [
        measured(step, both, (0.01 * both[0], 0.02 * both[1]), 0.1 + (0.9 if step <= 3 else 0.6))
        for step, both in enumerate(sizes)
    ]
    lines = [json.dumps(record) + "\n" for record in [RUN_STARTED, *extra, *steps]]
    (folder / "events.jsonl").write_text("".join(lines))
    return folder


def test_the_json_is_what_was_found():
    """Every figure once, in seconds and fractions of 1."""
    found = answer(*TYPED, "--add", "50")
    times = AffineTime([0.0] * 3, [1 / 100, 1 / 80, 1 / 20])
    advice = advise(times, 256, more=AffineTime([0.0], [1 / 50]))

    assert list(found) == [
        "global_batch_size",
        "overhead_s",
        "equal",
        "balanced",
        "best",
        "workers",
        "add",
    ]
    assert found["balanced"] == {
        "batch_size": list(advice.balanced.batch_size),
        "step_s": advice.balanced.step_s,
        "samples_per_s": advice.balanced.samples_per_s,
    }
    assert found["workers"][2] == {
        "rank": 2,
        "name": "2",
        "samples_per_s": 20.0,
        "samples_per_s_error": None,
        "intercept_s": 0.0,
        "max_batch_size": None,
        "equal_batch_size": 85,
        "batch_size": 25,
        "step_without_s": advice.without[2].step_s,
        "brings": advice.brings(2),
        "worth_keeping": True,
    }
    assert found["add"] == [
        {
            "samples_per_s": 50.0,
            "intercept_s": 0.0,
            "batch_size": advice.more[0].batch_size[-1],
            "step_s": advice.more[0].step_s,
            "step_shorter_by": advice.adds(0),
        }
    ]


def test_the_tables_add_up():
    """Sizes of both splits are the global batch, as printed."""
    text = plan(*TYPED).stdout
    rows = re.findall(r"^(\d)  +(\d+)  +0 ms +(\d+) +(\d+) .* (\w+)$", text, re.M)

    assert [row[1] for row in rows] == ["100", "80", "20"]
    assert sum(int(row[2]) for row in rows) == 256
    assert sum(int(row[3]) for row in rows) == 256
    assert {row[4] for row in rows} == {"keep"}


def test_the_page_shows_what_is_printed():
    """Its first example, to the letter."""
    page = (ROOT / "docs" / "plan.md").read_text("utf-8")
    command, _, printed = re.search(r"```console\n\$ (.*?)\n()(.*?)```", page, re.S).groups()

    assert CliRunner().invoke(app, command.split()[1:]).stdout == printed


@pytest.mark.parametrize("option", ["--mbit", "--lengths"])
def test_the_page_shows_the_end_of_what_is_printed(option):
    """Its examples of links and of lengths, which are those that the page names below them."""
    page = (ROOT / "docs" / "plan.md").read_text("utf-8")
    block = rf"```console\n\$ (evenstep plan [^\n]* {option} [^\n]*)\n\.\.\.\n(.*?)```"
    command, printed = re.search(block, page, re.S).groups()
    words = command.replace("lengths.txt", "fine-tuning").split()[1:]

    assert CliRunner(env={"COLUMNS": "160"}).invoke(app, words).stdout.endswith(printed)


def test_who_costs_more_than_he_brings_is_named():
    """And what it would be without him."""
    text = plan("--speeds", "1000,800,2", "--intercepts", ".01,.01,.9", *TYPED[2:]).stdout

    assert "leave out" in text
    assert "Fastest without worker 2:" in text
    assert re.search(r"^without 2 +153 ms", text, re.M)


def test_without_add_one_like_the_fastest_and_one_like_the_slowest():
    """One line where all are alike; their fixed costs and caps with them."""
    ends = answer(*TYPED, "--intercepts", ".1,.2,.3", "--max", "200,100,5")["add"]
    alike = answer("--speeds", "5,5", "--global-batch-size", 8)["add"]

    assert [(end["samples_per_s"], end["intercept_s"]) for end in ends] == [(100, 0.1), (20, 0.3)]
    assert ends[1]["batch_size"] == 5
    assert [one["batch_size"] for one in alike] == [2]


def test_a_recorded_run_speaks_for_itself(tmp_path):
    """Speeds, names, global batch, overhead and caps are its own."""
    capped = to_record(MemoryCapped(0, 1, 40, 1 << 30))
    folder = recorded(tmp_path, capped)
    found, told = answer("--run", folder), read_run(folder)

    assert [worker["name"] for worker in found["workers"]] == ["0 a cuda:0", "1 b cpu"]
    assert found["global_batch_size"] == 90
    assert found["overhead_s"] == pytest.approx(0.1) == told.overhead_s
    assert found["balanced"]["batch_size"] == [60, 30]
    assert found["balanced"]["step_s"] == pytest.approx(0.7, rel=0.02)
    assert found["workers"][1]["max_batch_size"] == 40
    assert found["workers"][0]["step_without_s"] is None
    text = plan("--run", folder).stdout
    assert "speeds from 7 recorded steps" in text
    assert "does not fit  needed" in text


def noisy(folder, largest_change, *, seed=0):
    """A run of two workers that are alike, 5 % of noise, sizes so far from 45 at most."""
    rng = np.random.default_rng(seed)
    records = [RUN_STARTED]
    for step in range(60):
        more = (step // 10 % 3 - 1) * largest_change
        sizes = np.array([45 + more, 45 - more])
        seconds = (0.005 + 0.0005 * sizes) * rng.lognormal(0, 0.05, 2)
        records.append(measured(step, sizes.tolist(), seconds.tolist()))
    (folder / "events.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.mark.parametrize("seed", range(8))
def test_speeds_come_with_their_errors(tmp_path, seed):
    """Workers that are alike do not look unlike without a word, whatever the noise made of them."""
    close = answer("--run", noisy(tmp_path, 2, seed=seed))["workers"]
    speeds = np.array([worker["samples_per_s"] for worker in close])
    errors = np.array([worker["samples_per_s_error"] for worker in close])

    assert (abs(1 - speeds / 2000) <= 2.5 * errors).all()
    assert (errors > 0.1).all()
    text = re.sub(r"\s+", " ", plan("--run", tmp_path).stdout)
    assert len(re.findall(r"\d+ ± \d+ %", text)) == 2
    assert "worker 0, 1 were too similar for this much noise" in text
    assert re.search(r"Steps near the sizes of the run are known to [1-4] %\.", text)


def test_sizes_far_apart_tell_speeds_well(tmp_path):
    """And nothing is said of errors then, past the figure; typed speeds have none."""
    far = answer("--run", noisy(tmp_path, 30))["workers"]
    text = plan("--run", tmp_path).stdout

    assert all(worker["samples_per_s_error"] < 0.1 for worker in far)
    assert all(abs(worker["samples_per_s"] / 2000 - 1) < 0.2 for worker in far)
    assert "±" in text
    assert "too similar" not in text
    assert "±" not in plan(*TYPED).stdout


def test_what_is_typed_beats_what_was_recorded(tmp_path):
    """Explicit options win."""
    options = ["--global-batch-size", 60, "--overhead", 0, "--max", 50]
    found = answer("--run", recorded(tmp_path), *options)

    assert (found["global_batch_size"], found["overhead_s"]) == (60, 0)
    assert found["workers"][0]["max_batch_size"] == 50


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--speeds, --run"),
        (["--speeds", "1,2"], "--global-batch-size"),
        (["--speeds", "1,fast", *TYPED[2:]], "1,fast"),
        (["--speeds", "1,0", *TYPED[2:]], "positive numbers"),
        (["--speeds", "1,,2", *TYPED[2:]], "positive numbers"),
        (["--speeds", "1,inf", *TYPED[2:]], "positive numbers"),
        (["--speeds", "1,2,3", "--global-batch-size", 2], "at least 3"),
        ([*TYPED, "--intercepts", "1,2"], "each of the 3 workers"),
        ([*TYPED, "--intercepts=-1"], "--intercepts"),
        ([*TYPED, "--max", "1,2"], "--max"),
        ([*TYPED, "--max", "1.5"], "whole numbers"),
        ([*TYPED, "--max", "80"], "at most 240"),
        ([*TYPED, "--overhead", "-1"], "--overhead"),
        ([*TYPED, "--overhead", "nan"], "--overhead"),
        ([*TYPED, "--add", "quick"], "--add"),
        ([*TYPED, "--run", "x"], "be given, one of them, got --speeds and --run"),
        (["--run", "/no/such/run"], "/no/such/run"),
        (["--run", "x", "--intercepts", "1"], "left out with --run"),
        ([*TYPED, "--mbit", "100"], "be given together"),
        ([*TYPED, "--mbit", "100,200", "--model-mb", "8"], "--mbit"),
        ([*TYPED, "--mbit", "100", "--model-mb", "0"], "--model-mb"),
        ([*TYPED, "--mbit", "100", "--model-mb", "8", "--chunks", "0"], "--chunks"),
        ([*TYPED, "--mbit", "9", "--model-mb", "8", "--chunks", str(10**9)], "from 1 to 10,000"),
        ([*TYPED, "--mbit", "9", "--model-mb", "1e308"], "from 0.001 to 1e+16, got 1e+308"),
        ([*TYPED, "--mbit", "1e-320", "--model-mb", "8"], "from 1e-18 to 1e+18"),
        (["--speeds", "1,1e308", *TYPED[2:]], "from 1e-18 to 1e+18"),
        (["--run", "x" * 300], "name a file that can be read"),
        (["--doctor", "/dev/zero"], "must be a file or a pipe, got /dev/zero"),
        ([*TYPED, "--mbit", "100", "--model-mb", "8", "--overlap", "2"], "--overlap"),
    ],
)
def test_a_wrong_option_ends_with_the_remedy(arguments, words):
    """Code 2, on stderr, so that nothing is read from stdout; the option and its value."""
    result = plan(*arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert words in re.sub(r"\s+", " ", result.stderr)


LINKS = ("--mbit", "200,200,50", "--model-mb", 8)


def test_links_are_counted_where_they_are_given():
    """All-reduce, equal and best shares of the balanced split."""
    found = answer(*TYPED, *LINKS, "--chunks", 16)["links"]
    ring_s = 2 * (2 / 3) * 8e6 / (50 * 125_000)
    balanced_s = answer(*TYPED)["balanced"]["step_s"]

    assert found["num_bytes"] == 8_000_000
    assert found["plain_s"] == pytest.approx(balanced_s + ring_s)
    assert found["best_s"] < 0.95 * found["plain_s"]
    assert sum(found["best_shares"]) == pytest.approx(1)
    assert found["best_shares"][2] < 0.02
    text = plan(*TYPED, *LINKS).stdout
    assert "The best shares make a step" in text
    assert re.search(r"^2 +50 +0 %$", text, re.M)


def test_a_narrow_terminal_has_it_all(monkeypatch):
    """At 60 columns no line is longer, no word is broken, and no column is missing."""
    wide = plan(*TYPED, *LINKS).stdout
    monkeypatch.setenv("COLUMNS", "60")
    narrow = plan(*TYPED, *LINKS).stdout

    assert max(map(len, wide.splitlines())) > 60
    assert max(map(len, narrow.splitlines())) <= 60
    assert set(narrow.split()) == set(wide.split())


def test_an_error_is_broken_between_words_and_not_within_a_command(monkeypatch):
    """So that what stands between backticks can be copied."""
    monkeypatch.setenv("COLUMNS", "30")
    lines = plan("--speeds", "2,1").stderr.splitlines()

    assert len(lines) > 3
    assert any("`--global-batch-size 256`" in line for line in lines)


def test_equal_links_gain_nothing():
    """And that is said."""
    text = plan(*TYPED, "--mbit", 100, "--model-mb", 8).stdout

    assert "No shares are faster than plain all-reduce on these links." in text


def test_a_file_that_is_no_run_is_named_with_its_line(tmp_path):
    """In the words of the option, and with what to give instead."""
    (tmp_path / "events.jsonl").write_text("nonsense\n")
    result = plan("--run", tmp_path)

    assert result.exit_code == 2
    assert "`evenstep plan --run`" in result.output
    assert "line 1: no JSON" in result.output


def test_a_folder_that_is_not_there_is_named_once(tmp_path):
    """With the reason, and the remedy."""
    missing = tmp_path / "nowhere"

    text = re.sub(r"\s+", "", plan("--run", missing).output)

    assert text.count(f"{missing.name}") == 1
    assert "Nosuchfileordirectory" in text
    assert "Runtime(run_dir=...)" in text


def test_a_run_by_cost_says_what_each_would_have_saved(tmp_path):
    """By its own events, and that batch sizes explain little there."""
    recorded(tmp_path)
    assert "by cost" not in plan("--run", tmp_path).stdout
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    alone = {"equal_split_s": 1.2, "speed_split_s": 0.9, "cost_split_s": 0.75}
    steps = [json.loads(line) | alone for line in lines[1:]]
    (tmp_path / "events.jsonl").write_text("\n".join([lines[0], *map(json.dumps, steps)]) + "\n")
    text = " ".join(plan("--run", tmp_path).stdout.split())

    assert "speeds alone would have saved 25 %, lengths alone 38 %; both saved" in text
    assert read_run(tmp_path).saved_by_cost[:2] == pytest.approx((0.25, 0.375))


def test_damage_in_a_run_is_said_and_the_rest_is_used(tmp_path):
    """On standard error, as what was asked for is read by programs."""
    file = recorded(tmp_path) / "events.jsonl"
    file.write_text(file.read_text() + "nonsense\n")
    done = subprocess.run(
        [sys.executable, "-m", "evenstep.cli", "plan", "--run", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(done.stdout)["global_batch_size"] == 90
    assert "1 damaged line is left out (line 10: no JSON). The rest is used." in done.stderr
