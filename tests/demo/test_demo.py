"""The demo as a person starts it, on two small workers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from evenstep.demo._recording import Follower

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What one short demo printed, and the folder it left."""
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "evenstep.cli", "demo", "--speeds", "1,1/2", "--steps", "10"]
    result = subprocess.run(
        [*command, "--device", "cpu", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    return result, out


def test_it_ends_well_and_says_what_it_found(finished):
    """Both runs are announced, and the result names figures and files."""
    result, _ = finished

    assert result.returncode == 0, result.stdout + result.stderr
    for words in ("Equal split", "Balanced (policy auto)", "times as fast", "Same training"):
        assert words in result.stdout


def test_it_leaves_picture_figures_and_events(finished):
    """All three can be looked at afterwards, and agree with each other."""
    _, out = finished
    figures = json.loads((out / "summary.json").read_text())
    runs = {name: Follower(out / name).update() for name in ("equal", "balanced", "reference")}

    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert all(run.ended and len(run.loss) == 10 for run in runs.values())
    assert figures["num_steps"] == 10
    assert figures["balanced"]["batch_size"] == list(runs["balanced"].batch_size[-1])


def test_the_balanced_run_gives_more_to_the_faster_worker(finished):
    """Twice the speed, about twice the samples, of the same global batch; nobody else moves."""
    _, out = finished
    equal, balanced = (Follower(out / name).update() for name in ("equal", "balanced"))
    fast, slow = balanced.batch_size[-1]

    assert set(equal.batch_size) == {(24, 24)}
    assert fast + slow == 48
    assert 28 <= fast <= 36


def test_both_runs_learn_the_same(finished):
    """Their losses differ by rounding, not by what was trained on."""
    _, out = finished
    figures = json.loads((out / "summary.json").read_text())

    assert figures["loss_difference"] < 1e-4
    assert figures["equal"]["final_loss"] < 5.0
