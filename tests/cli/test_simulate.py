"""``evenstep simulate`` compares policies on the workers that are named."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from evenstep import sim
from evenstep.testing import run_workers

from . import app
from .trained import trained

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
    """Scenarios by seeds and policies; a line for each policy."""
    found = answer("--scenario", "burst,jitter", "--policy", "equal,lbb", *SMALL)
    runs, lines = found["runs"], found["standings"]

    assert len({(r["scenario"], r["seed"], r["policy"]) for r in runs}) == len(runs) == 8
    assert sorted(lines, key=lambda line: line["mean_regret"]) == lines
    for line in lines:
        mine = [r for r in runs if r["policy"] == line["policy"]]
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


def test_left_alone_it_says_what_can_be_asked():
    """Nothing runs."""
    result = simulate()

    assert "--scenario" in result.output
    assert "Usage" in result.output


def test_workers_are_all_it_has_to_be_told():
    """All policies that need no settings are compared."""
    found = answer("--scenario", "static", "--steps", 2, "--seeds", 1)

    assert {line["policy"] for line in found["standings"]} == NAMED


def test_workers_may_be_given_by_their_speeds():
    """Samples a second and fixed seconds; every seed has other noise."""
    asked = ["--speeds", "40,20,10", "--intercepts", "0.1", "--seeds", 2, "--steps", 50]
    exact = answer(*asked, "--noise", 0, "--policy", "equal", "--global-batch-size", 30)["runs"]
    noisy = answer(*asked, "--noise", 0.2, "--policy", "equal", "--global-batch-size", 30)["runs"]

    assert [run["step_s"] for run in exact] == pytest.approx([1.1, 1.1])
    assert exact[0]["best_step_s"] == pytest.approx(0.1 + 9 / 20)  # of 17, 9 and 4
    assert noisy[0]["step_s"] > 1.15
    assert noisy[0]["step_s"] != noisy[1]["step_s"]


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
        assert regret["equal"] > 1


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


def test_one_column_has_the_samples_per_second_beside_it():
    """Several are of other workers, and have their mean."""
    text = simulate("--scenario", "static", "--policy", "equal", *SMALL).stdout

    assert re.search(r"^policy +static +samples/s +idle$", text, re.M)


def test_policies_of_one_s_own(tmp_path):
    """From the current folder, by a program that is installed."""
    (tmp_path / "mine.py").write_text("from evenstep.policies import Equal as Mine\n")
    script = [sys.executable, "-P", "-c", "from evenstep.cli import main; main()"]
    asked = ["simulate", "--policy", "mine:Mine,equal", "--scenario", "static", *SMALL, "--json"]
    result = subprocess.run(
        [*script, *asked], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    assert (result.returncode, result.stderr) == (0, "")  # progress is for a terminal alone
    mine, equal = json.loads(result.stdout)["standings"]
    assert mine["policy"] == "mine:Mine"
    assert mine["regret"] == equal["regret"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "storm"], "'storm'"),
        (["--scenario", "burst,burst"], "each of them once"),
        (["--scenario", "burst,"], "each of them once"),
        (["--scenario", "static", "--policy", "nonsense"], "'nonsense'"),
        (["--scenario", "static", "--policy", "no.such:Thing"], "imported"),
        (["--scenario", "static", "--policy", "fixed"], "--policy"),
        (["--scenario=burst", "--seeds", "0"], "--seeds` must be from 1 to 10,000, got 0"),
        (["--scenario=burst", "--seeds", "1000000000"], "--seeds` must be from 1 to 10,000"),
        (["--scenario=burst", "--steps", "0"], "--steps"),
        (
            ["--scenario=burst", "--steps", "1000000000"],
            "must be from 1 to 12,500,000, got 1000000000",
        ),
        (["--scenario=burst", "--world-size", "0"], "--world-size"),
        (
            ["--scenario=burst", "--world-size", "1000000000"],
            "must be from 1 to 100,000",
        ),
        (["--scenario=burst", "--global-batch-size", "0"], "--global-batch-size"),
        (["--scenario=burst", "--global-batch-size", "3"], "--global-batch-size"),
        (["--scenario", "capped", "--global-batch-size", "9000"], "'capped'"),
        (["--policy", "auto"], "--scenario or --speeds or --trace"),
        (["--scenario=burst", "--intercepts", "1"], "come with --speeds or --trace"),
        (["--scenario=burst", "--noise", "0.1"], "come with --speeds"),
        (["--speeds", "2,1", "--noise", "2"], "--noise` must be from 0 to 1"),
        (["--speeds", "2,1", "--world-size", "2"], "come with --scenario"),
        (["--speeds", "2,0"], "--speeds"),
        (["--trace", "/no/such.csv"], "/no/such.csv"),
    ],
)
def test_a_wrong_option_ends_with_the_remedy(arguments, words):
    """Code 2, on stderr, before anything runs."""
    result = simulate(*arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert words in re.sub(r"\s+", " ", result.stderr)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--steps", 5),
        ("--world-size", 5),
        ("--seeds", 5),
        ("--intercepts", "1,2"),
        ("--noise", 0.1),
    ],
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
