"""Rivals take turns, every round is kept, and figures are read from what workers left."""

import json
import math

import pytest

from benchmarks.rivals.__main__ import measured, order
from benchmarks.rivals._environments import RIVALS
from benchmarks.rivals._figures import figures, settled_ratio
from benchmarks.rivals._rounds import opened, write
from benchmarks.rivals._tables import failures_table, seconds_table


def worker(step_s, size, num_steps=4):
    """What a worker leaves that takes ``size`` samples at each step."""
    return {
        "began": [[100 + step_s * step, size] for step in range(num_steps)],
        "ended_s": 100 + step_s * num_steps,
        "num_updates": num_steps,
        "loss": 0.5,
        "accuracy": 0.9,
        "cpu_share": 0.1,
    }


def done(settled_s, ended="2026-01-01T00:00:00+00:00"):
    """A round that came to its end."""
    told = {"step_s": 2 * settled_s, "settled_step_s": settled_s, "accuracy": 0.9}
    return {"status": "done", "ended": ended, "cpu_share": 0.1, **told}


HANGS = {"status": "failed", "error": "ended after 9 s, its time limit\nrank 3", "ended": "2026"}


def found(name, *rounds, error=None):
    """A rival's file."""
    task = {"global_batch_size": 256}
    return {"rival": name, "error": error, "task": task, "rounds": list(rounds)}


def test_seconds_are_those_of_a_global_batch_whoever_took_the_samples():
    """Two workers with 64 and 192 samples a step; one that goes its own way counts alike."""
    told = figures([worker(1.0, 64), worker(1.0, 192)])
    apart = figures([worker(1.0, 64, 8), worker(0.5, 96, 16)])

    assert told["num_samples"] == 1024
    assert told["step_s"] == told["settled_step_s"] == 1.0
    assert told["settled_shares"] == [0.25, 0.75]
    assert apart["step_s"] == 1.0
    assert apart["settled_shares"] == pytest.approx([0.25, 0.75], abs=0.04)


def test_settled_leaves_the_first_half_of_the_samples_out():
    """A worker that was slow in the first two of four steps."""
    one = worker(1.0, 256)
    one["began"] = [[0.0, 256], [10.0, 256], [20.0, 256], [21.0, 256]]
    one["ended_s"] = 22.0

    assert figures([one])["settled_step_s"] == 1.0


def test_rivals_take_turns():
    """Each round begins with another one; what is not timed comes after all rounds."""
    names = ["ddp", "dbs", "evenstep"]

    assert list(order(names, 2)) == ["ddp", "evenstep", "evenstep", "ddp", "dbs", "dbs"]


def test_only_rounds_beside_each_other_are_compared():
    """Not one that failed, nor one of another day."""
    ours = found("evenstep", done(1.0), done(1.0), done(1.0))
    theirs = found("ddp", done(2.0), HANGS, done(9.0, "2026-01-02T00:00:00+00:00"))

    assert settled_ratio(theirs, ours) == (2.0, None)


def test_what_cannot_be_had_is_said(tmp_path):
    """Without its clone DBS has no rounds, and the reason is in its file and in its row."""
    told = opened("dbs", tmp_path, into=tmp_path, clones=tmp_path)
    write(told, tmp_path)
    kept = json.loads((tmp_path / "dbs.json").read_text("utf-8"))

    assert kept["rounds"] == []
    assert "Dynamic_Load_Balance" in kept["error"]
    assert measured(kept) == {"error": kept["error"]}


def test_a_round_that_failed_is_kept_and_told(tmp_path):
    """It is no reason to try again until it works."""
    told = opened("ddp", tmp_path, into=tmp_path, clones=None)
    told["rounds"] += [HANGS, done(1.0)]
    write(told, tmp_path)
    kept = opened("ddp", tmp_path, into=tmp_path, clones=None)

    assert kept["rounds"] == told["rounds"]
    assert measured(kept)["failed"] == 1
    assert failures_table([kept])[2:] == ["| ddp | 1 of 2 | ended after 9 s, its time limit |"]


def test_the_table_has_a_line_for_each_rival_that_was_timed():
    """The others are in the table of failures alone."""
    founds = [
        found("evenstep", done(1.0), done(1.0)),
        found("torchft", done(2.0), done(2.0)),
        found("hivemind", error="`pip` said:\nERROR: no matching torch"),
        found("dbs", done(1.0), HANGS),
    ]
    _, _, ours, theirs = seconds_table(founds)

    assert "| 1 |" in ours
    assert "| 2.000 ± 0.000 | 2.00 ± 0.00 |" in theirs
    assert len(failures_table(founds)) == 4
    assert "ERROR: no matching torch" in failures_table(founds)[2]


def test_every_split_of_1228_samples_has_five_steps_an_epoch():
    """Those of DBS, with its rounding; among 1,280 samples some have six, and the ranks part."""

    def steps(num_train):
        shares = [n / total for total in (254, 255, 256, 257) for n in range(25, 200)]
        return {math.ceil(int(f * num_train) / int(256 * f)) for f in shares}

    assert steps(RIVALS["dbs-1228"].num_train) == {5}
    assert steps(RIVALS["dbs"].num_train) == {5, 6}
