"""A `fit` of Keras on two workers under its callback: the same losses, and who is waited for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import ROOT, environment, events

SCRIPT = Path(__file__).with_name("fits.py")
LAUNCHER = ROOT / "examples" / "local_workers.py"
STEPS = 40
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TF_USE_LEGACY_KERAS": "1"}
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


class Fits:
    """What two workers said of all fits, and the folder they wrote to."""

    def __init__(self, folder):
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, LAUNCHER, "2", SCRIPT, folder],
            capture_output=True,
            text=True,
            env=environment(QUIET | {"PYTHONPATH": path}),
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.folder, self.errors, self.out = folder, done.stderr, done.stdout
        rows = re.findall(r"^LOSSES (\w+) (\d) (.*)$", done.stdout, re.MULTILINE)
        self.losses = {(name, int(rank)): rest for name, rank, rest in rows}
        # Rank 0 says all of a fit before it begins the next one.
        parts = re.split(r"FIT (\w+) 0\n", done.stderr)
        self.said = dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    """All fits, in one run: workers take long to start."""
    return Fits(tmp_path_factory.mktemp("keras"))


@pytest.mark.parametrize("name", ["watched", "broken"])
def test_losses_and_weights_are_the_same_bit_by_bit(fits, name):
    """With a watch, also with one that fails; and the model has nothing of it afterwards."""
    for rank in (0, 1):
        assert fits.losses[name, rank] == fits.losses["plain", rank]
        assert fits.losses[name, rank].endswith(" []")
        assert len(re.findall("0x", fits.losses[name, rank])) == STEPS


@pytest.mark.parametrize(
    ("name", "cause"), [("watched", "compute"), ("logging", "logging"), ("input", "input")]
)
def test_the_slow_rank_is_named_with_its_cause(fits, name, cause):
    """Own forward, own callback and own input are told apart, before waits in the graph."""
    (verdict,) = re.findall(r"^evenstep watch: .* steps, .*$", fits.said[name], re.MULTILINE)
    ranks = re.findall(r"for (rank \d) \([^)]*\), because of [^;]*" + cause, verdict)

    assert ranks == ["rank 1"], verdict


def test_it_says_what_balancing_brings_and_where_its_recipe_is(fits):
    """The summary and the lines are those of `evenstep watch`."""
    said = fits.said["watched"]

    assert re.search(r"^evenstep watch: step \d+, .* s a step: ", said, re.MULTILINE)
    assert re.search(r"^evenstep watch: balanced by speed \d\.\d+x", said, re.MULTILINE)
    assert "evenstep watch: keras makes the model: see docs/tensorflow.md" in said


def test_events_are_those_of_a_watched_run(fits):
    """Rank 0 waits for rank 1; both have the samples of their shards; evaluations are seen."""
    accounts = events(fits.folder / "run", "StepsAccounted")
    waited_s = [sum(each) for each in zip(*(one["waiting_s"] for one in accounts), strict=True)]

    assert waited_s[0] > 3 * waited_s[1]
    assert events(fits.folder / "run", "StepMeasured")[-1]["batch_size"] == [12, 12]
    assert len(events(fits.folder / "run", "RunEnded")) == 1


def test_a_fit_after_one_that_failed_is_watched_alone(fits):
    """The first is said and stopped before the second begins: one thread, and one of each call."""
    told = re.findall(r"^evenstep watch: (\d+) steps, ", fits.said["again"], re.MULTILINE)

    assert len(told) == 2
    assert int(told[0]) <= STEPS // 2 < int(told[1])
    assert sorted(re.findall(r"^THREADS (\d \d \d)$", fits.out, re.MULTILINE)) == ["0 1 1", "1 1 1"]


def test_a_fault_of_its_own_switches_it_off(fits):
    """In one line of each rank, which may come while the other one ends the fit before."""
    off = [line for line in fits.errors.splitlines() if " off on rank " in line]
    ranks = [
        re.match(r"evenstep watch: off on (rank \d), training goes on \(", line)[1] for line in off
    ]

    assert sorted(ranks) == ["rank 0", "rank 1"]
    assert "evenstep watch" not in re.sub(r"evenstep watch: off .*", "", fits.said["broken"])
