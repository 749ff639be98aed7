"""The demo as a person starts it, on two small workers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from evenstep._telemetry import EventFile
from evenstep.demo._run_demo import DemoFailed, run_demo, workers
from evenstep.demo._worker import DemoJob
from evenstep.events import StepMeasured

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def steps_of(run_dir):
    return [event for event in EventFile(run_dir) if isinstance(event, StepMeasured)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What one short demo printed, and the folder it left; the policy is of its folder."""
    out = tmp_path_factory.mktemp("demo")
    (out / "mine.py").write_text("from evenstep.policies import Auto as Mine\n")
    script = [sys.executable, "-P", "-c", "from evenstep.cli import main; main()"]
    asked = ["demo", "--speeds", "1,1/2", "--steps", "10", "--policy", "mine:Mine"]
    result = subprocess.run(
        [*script, *asked, "--out", "runs"],
        cwd=out,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    return result, out / "runs"


def test_it_ends_well_and_says_what_it_found(finished):
    """Both runs are announced, and the result names figures and files."""
    result, _ = finished

    assert result.returncode == 0, result.stdout + result.stderr
    for words in ("Equal split", "Balanced", "times as fast", "Physical limit", "Same training"):
        assert words in result.stdout


def test_it_leaves_picture_figures_and_events(finished):
    """All three can be looked at afterwards, and agree with each other."""
    _, out = finished
    figures = json.loads((out / "summary.json").read_text())
    runs = {name: steps_of(out / name) for name in ("equal", "balanced")}

    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert all(len(steps) == 10 for steps in runs.values())
    assert figures["num_steps"] == 10
    assert figures["balanced"]["batch_size"] == list(runs["balanced"][-1].batch_size)


def test_the_balanced_run_gives_more_to_the_faster_worker(finished):
    """Twice the speed, about twice the samples, of the same global batch; nobody else moves."""
    _, out = finished
    equal, balanced = (steps_of(out / name) for name in ("equal", "balanced"))
    fast, slow = balanced[-1].batch_size

    assert {step.batch_size for step in equal} == {(24, 24)}
    assert fast + slow == 48
    assert 28 <= fast <= 36


def test_both_runs_learn_the_same(finished):
    """Their losses differ by rounding, not by what was trained on."""
    _, out = finished
    figures = json.loads((out / "summary.json").read_text())

    assert figures["loss_difference"] < 1e-4
    assert figures["equal"]["final_loss"] < 5.0


def test_a_failing_worker_ends_the_demo_with_its_own_words(tmp_path):
    """The message holds the first error and says where the rest is."""
    job = DemoJob("evenstep.no_such_module:Policy", (1.0, 0.5), 10, 0.001)
    with pytest.raises(DemoFailed) as caught:
        run_demo(job, tmp_path, Console(quiet=True))

    assert "no_such_module" in str(caught.value)
    assert f"More in {tmp_path / 'balanced' / 'failed.txt'}" in str(caught.value)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_an_interrupt_leaves_no_process_behind(tmp_path):
    """Ctrl-C in the middle of training ends torchrun and every worker."""
    job = {"policy": "auto", "speeds": [1.0, 0.5], "num_steps": 5000, "seconds_per_sample": 0.001}
    (tmp_path / "job.json").write_text(json.dumps(job))
    seen = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path, seen)

    assert seen == [3]
    assert num_processes_of(tmp_path) == 0


def interrupted(run_dir, seen):
    """Count the processes of a run in the middle of training, and break it off."""
    with workers(run_dir, 2) as process:
        while not (run_dir / "events.jsonl").exists():
            assert process.poll() is None, (run_dir / "output.txt").read_text()
            time.sleep(0.1)
        seen.append(num_processes_of(run_dir))
        raise KeyboardInterrupt


def num_processes_of(run_dir):
    """How many processes name ``run_dir`` among their arguments."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:  # it ended in between
            continue
    return sum(str(run_dir).encode() in line for line in lines)
