"""``evenstep simulate`` compares what was asked for, and writes what it found."""

import io
import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from evenstep import sim
from evenstep.cli import _progress_bar
from evenstep.testing import run_workers
from tests._snippets import ROOT

from . import app
from .trained import trained

EIGHT = ["static", "step", "drift", "burst", "jitter", "diurnal", "correlated", "square"]
NAMED = {"auto", "dbs", "dynamic-batching", "equal", "lb-bsp-2018", "lb-bsp-2020", "lbb"}
SMALL = ["--steps", "20", "--seeds", "2", "--world-size", "4"]
TRACE = ["step,worker,seconds,samples"] + [
    f"{step},{worker},{0.02 * (1 + worker)},{20}" for step in range(12) for worker in range(3)
]


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def answer(*arguments):
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "lab.csv"
    file.write_text("\n".join(TRACE) + "\n")
    return file


def test_every_combination_is_run_and_the_best_stands_first():
    """Scenarios by seeds, policies, schemes; a line for each policy under each scheme."""
    asked = ["--scenario", "burst,jitter", "--policy", "equal,lbb", "--scheme", "bsp,hybrid"]
    found = answer(*asked, *SMALL)
    runs, lines = found["runs"], found["standings"]

    assert len({(r["scenario"], r["seed"], r["policy"], r["scheme"]) for r in runs}) == 16
    assert len(runs) == 16
    assert sorted(lines, key=lambda line: line["mean_regret"]) == lines
    for line in lines:
        mine = [r for r in runs if (r["policy"], r["scheme"]) == (line["policy"], line["scheme"])]
        assert line["mean_regret"] == pytest.approx(sum(r["regret"] for r in mine) / 4)
        assert set(line["regret"]) == {"burst", "jitter"}


def test_a_run_is_what_the_simulator_says():
    """The seeds from 0, 64 samples a worker."""
    found = answer("--scenario", "burst", "--policy", "auto", *SMALL)["runs"]
    given = sim.scenario("burst", 4, 20, seed=1)
    cluster = given.cluster(256)
    regret = sim.run("auto", cluster, given.workload).regret(sim.oracle(cluster, given.workload))

    assert found[1]["regret"] == pytest.approx(regret)
    assert (found[1]["seed"], found[1]["global_batch_size"]) == (1, 256)


def test_left_alone_it_takes_the_eight_and_all_policies():
    """The scenarios that policies are compared on."""
    found = answer("--steps", 2, "--seeds", 1, "--jobs", 1)

    assert list(found["standings"][0]["regret"]) == EIGHT
    assert {line["policy"] for line in found["standings"]} == NAMED


def test_several_processes_find_the_same():
    """And in the same order."""
    asked = ["--scenario", "static", "--policy", "equal,lbb", *SMALL]

    assert answer(*asked, "--jobs", 2) == answer(*asked, "--jobs", 1)


def test_a_trace_brings_workers_steps_and_global_batch(trace):
    """Its fixed costs can be told."""
    found = answer("--trace", trace, "--policy", "auto,equal")
    fixed = answer("--trace", trace, "--policy", "equal", "--intercepts", "0.01")

    assert {run["global_batch_size"] for run in found["runs"]} == {60}
    assert found["standings"][0]["policy"] == "auto"
    equal = next(run for run in found["runs"] if run["policy"] == "equal")
    assert equal["step_s"] == pytest.approx(0.06)  # as recorded: 20 samples each
    # The fast pay less for each sample that they take over, if a part of their time is fixed.
    assert fixed["runs"][0]["best_step_s"] < found["runs"][0]["best_step_s"]
    assert fixed["runs"][0]["seed"] is None


def test_a_trace_is_compared_with_what_was_recorded(trace):
    """The mean of its slowest workers' times; not where the samples of a step are others."""
    told = simulate("--trace", trace, "--policy", "equal")
    others = answer("--trace", trace, "--policy", "equal", "--global-batch-size", "30")

    assert "As recorded, a step of lab took 0.06 s in the mean, 82 % above" in told.stdout
    assert answer("--trace", trace, "--policy", "equal")["recorded_step_s"] == {"lab": 0.06}
    assert others["recorded_step_s"] == {"lab": None}


@pytest.mark.cluster
def test_a_run_that_was_trained_is_a_trace(tmp_path):
    """By its folder or its events: policies on what its own workers took, ten times apart."""
    run_workers(2, trained, str(tmp_path / "mine"))
    for path in (tmp_path / "mine", tmp_path / "mine" / "events.jsonl"):
        found = answer("--trace", path, "--policy", "auto,equal")
        regret = {line["policy"]: line["mean_regret"] for line in found["standings"]}

        assert [run["scenario"] for run in found["runs"]] == ["mine"] * 2
        assert found["runs"][0]["global_batch_size"] == 32
        assert regret["auto"] < 1
        assert regret["equal"] > 2


def test_events_that_are_all_damaged_are_named_with_their_line(tmp_path):
    """In the words of the option."""
    (tmp_path / "events.jsonl").write_text('{"event": "Schema", "version": 1}\nnothing\n')
    result = simulate("--trace", tmp_path)

    assert result.exit_code == 2
    assert "line 2: no JSON" in re.sub(r"[│\s]+", " ", result.stderr)


def test_a_trace_may_stand_beside_scenarios(trace):
    """In a column of its own; their samples per second are not averaged."""
    text = simulate("--trace", trace, "--scenario", "static", "--policy", "equal", *SMALL).stdout

    assert re.search(r"^policy +static +lab +mean +idle$", text, re.M)
    assert "lab at 60 samples a step" in text


def test_columns_that_say_nothing_are_left_out():
    """Moves where samples move, staleness where ranks step alone, the scheme where not all BSP."""
    asked = ["--scenario", "static", "--policy", "equal", *SMALL]

    assert re.search(r"^policy +static +samples/s +idle$", simulate(*asked).stdout, re.M)
    asked += ["--scheme", "hybrid,benchmarks._local_sgd:LocalSgd", "--move-cost", "0.03"]
    others = simulate(*asked).stdout
    pattern = r"^policy +scheme +static +samples/s +idle +moves/step +staleness$"
    assert re.search(pattern, others, re.M)
    assert "takes 3.0 % of" in others


def test_policies_and_schemes_of_one_s_own(tmp_path):
    """From the current folder, by a program that is installed, in other processes too."""
    policy = "from evenstep.policies import Equal as Mine\n"
    scheme = "from evenstep.claims import Bsp as Own\n"
    (tmp_path / "mine.py").write_text(policy + scheme)
    script = [sys.executable, "-P", "-c", "from evenstep.cli import main; main()"]
    asked = ["simulate", "--policy", "mine:Mine,equal", "--scheme", "mine:Own", "--jobs", "2"]
    result = subprocess.run(
        [*script, *asked, "--scenario", "static", *SMALL, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 0, result.stderr  # which tells of progress past two seconds
    mine, equal = json.loads(result.stdout)["standings"]
    assert (mine["policy"], mine["scheme"]) == ("mine:Mine", "mine:Own")
    assert mine["regret"] == equal["regret"]


def test_a_page_and_a_picture_are_written(tmp_path):
    """The page shows the picture from where it lies, the figures, and the command again."""
    page, png = tmp_path / "docs" / "board.md", tmp_path / "docs" / "images" / "board.png"
    asked = ["--scenario", "static,burst", "--policy", "equal,lbb", *SMALL]
    printed = simulate(*asked, "--markdown", page, "--png", png).stdout
    text = page.read_text()

    assert png.read_bytes().startswith(b"\x89PNG")
    assert "](images/board.png)" in text
    assert "| policy | static | burst | mean | samples/s | idle |" in text
    for line in printed.splitlines()[3:]:
        assert f"| {' | '.join(line.split())} |" in text
    command = re.search(r"^\$ evenstep (.*)$", text, re.M)[1].split()
    page.unlink()
    CliRunner().invoke(app, command)
    assert page.read_text() == text


@pytest.mark.parametrize("scenario", ["jitter", pytest.param("static", marks=pytest.mark.slow)])
def test_the_leaderboard_is_what_its_command_prints(scenario):
    """Two of its policies in a scenario: the page is of this code."""
    page = (ROOT / "docs" / "leaderboard.md").read_text("utf-8")
    names = re.search(r"^\| policy \| (.*) \|$", page, re.M)[1].split(" | ")
    found = answer("--scenario", scenario, "--policy", "equal,dynamic-batching")

    for line in found["standings"]:
        row = re.search(rf"^\| {line['policy']} \| (.*) \|$", page, re.M)[1].split(" | ")
        written = dict(zip(names, row, strict=True))
        assert written[scenario] == shown(line["regret"][scenario])
    policies = re.findall(r"^\| ([a-z0-9-]+) \| \d", page, re.M)
    assert set(policies) == NAMED


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "storm"], "'storm'"),
        (["--scenario", "burst,burst"], "each of them once"),
        (["--scenario", "burst,"], "each of them once"),
        (["--policy", "nonsense"], "'nonsense'"),
        (["--policy", "no.such:Thing"], "imported"),
        (["--policy", "fixed"], "--policy"),
        (["--scheme", "asp"], "--scheme"),
        (["--seeds", "0"], "--seeds"),
        (["--seeds", "7-3"], "--seeds"),
        (["--seeds", "few"], "--seeds"),
        (["--seeds", "1000000000"], "--seeds` must be a number from 1 to 10,000"),
        (["--seeds", "9" * 5000], "--seeds` must be a number"),
        (["--steps", "0"], "--steps"),
        (["--steps", "1000000000"], "--steps` must be from 1 to 12,500,000, got 1000000000"),
        (["--world-size", "0"], "--world-size"),
        (["--world-size", "1000000000"], "--world-size` must be from 1 to 100,000"),
        (["--global-batch-size", "0"], "--global-batch-size"),
        (["--global-batch-size", "3"], "--global-batch-size"),
        (["--scenario", "capped", "--global-batch-size", "9000"], "'capped'"),
        (["--move-cost", "-1"], "--move-cost"),
        (["--jobs", "0"], "--jobs"),
        (["--intercepts", "1"], "come with --trace"),
        (["--trace", "/no/such.csv"], "/no/such.csv"),
        (["--png", "picture.jpg"], ".png"),
        (["--markdown", "page.txt"], ".md"),
        (["--lengths", "/dev/zero"], "--lengths` must be a file or a pipe, got /dev/zero"),
    ],
)
def test_a_wrong_option_ends_with_the_remedy(arguments, words):
    """Code 2, on stderr, before anything runs."""
    result = simulate(*arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert words in re.sub(r"\s+", " ", result.stderr)


@pytest.mark.parametrize(("option", "ending"), [("--png", ".png"), ("--markdown", ".md")])
def test_a_table_stands_where_a_file_cannot_be_written(option, ending):
    """Here its name is longer than any system takes."""
    asked = ["--scenario", "static", "--policy", "equal", *SMALL]
    result = simulate(*asked, option, "x" * 300 + ending)

    assert result.exit_code == 1
    assert "equal" in result.stdout
    assert "could not be written" in re.sub(r"\s+", " ", result.stderr)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--steps", 5), ("--world-size", 5), ("--seeds", 5), ("--intercepts", "1,2")],
)
def test_what_a_trace_has_by_itself_is_not_told(trace, option, value):
    """Rather than passed over without a word."""
    result = simulate("--trace", trace, option, value)

    assert result.exit_code == 2
    assert option in result.stderr


@pytest.mark.parametrize(
    ("line", "row", "words"),
    [(3, "0,1,soon,20", "line 3"), (5, "5,0,0.1,20", "line 5"), (1, "step,worker", "line 1")],
)
def test_a_bad_trace_is_named_with_its_line(trace, line, row, words):
    """The option, the file and the line."""
    lines = list(TRACE)
    lines[line - 1] = row
    trace.write_text("\n".join(lines) + "\n")
    said = re.sub(r"\s+", " ", simulate("--trace", trace).stderr)

    assert "--trace" in said
    assert words in said


def test_a_picture_without_matplotlib_is_refused_at_once(tmp_path, monkeypatch):
    """With what to install, before anything runs."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = simulate("--png", tmp_path / "x.png")

    assert (result.exit_code, result.stdout) == (1, "")
    said = re.sub(r"\s+", "", result.stderr)
    assert re.search(r"pipinstall.*\[demo\]", said)


def test_short_runs_are_quiet_and_long_ones_are_not():
    """A line now and then where nobody looks on; stdout is for the table alone."""
    quiet, said = io.StringIO(), io.StringIO()
    with _progress_bar.Progress(3, stream=quiet) as progress:
        progress.step()
    with _progress_bar.Progress(3, stream=said, quiet_s=0.0) as progress:
        progress.step()

    assert quiet.getvalue() == ""
    assert "of 3 runs" in said.getvalue()


def test_a_terminal_is_left_clean():
    """The line is written over, and taken away in the end."""
    terminal = _Terminal()
    with _progress_bar.Progress(3, stream=terminal, quiet_s=0.0) as progress:
        progress.step()

    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith(" \r")


def test_what_is_left_is_said_in_words():
    """Seconds, and minutes past ninety of them."""
    assert _progress_bar.describe(2, 6, 5.0) == "evenstep: 2 of 6 runs, about 10 s left"
    assert _progress_bar.describe(1, 101, 6.0) == "evenstep: 1 of 101 runs, about 10 min left"


def shown(share):
    """A share in percent, as the tables have it."""
    value = 100 * share
    return f"{value:.1f}" if abs(round(value, 1)) < 10 else f"{value:.0f}"


class _Terminal(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self):
        return True
