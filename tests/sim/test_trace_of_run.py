"""A run's own events are a trace: policies are compared on what its workers really took."""

import json
import logging
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from evenstep import sim
from evenstep.events import Rebalanced, RunStarted, StepMeasured, to_record
from evenstep.policies import Fixed

from .._tiers import slow_but

INTERCEPT_S, SLOPE_S = np.array([0.02, 0.05]), np.array([0.001, 0.004])


def started(total=40, world_size=2):
    return RunStarted(world_size, total, 100, "Auto()", ("a",) * world_size, ("cpu",) * world_size)


def measured(step, sizes, *, factor=1.0):
    ran = np.array(sizes) > 0
    seconds = factor * np.where(ran, INTERCEPT_S + SLOPE_S * np.array(sizes), 0.0)
    slowest_s = float(seconds.max())
    times = tuple(seconds.tolist())
    idle = tuple((slowest_s - seconds).tolist())
    return StepMeasured(step, 0, sizes, times, (0.0, 0.0), idle, slowest_s, 0.1, None, None, None)


PLANS = [(20, 20)] * 3 + [(32, 8)] * 3 + [(30, 10)] * 2


def run(folder, events, *, name="mine", schema=1):
    file = folder / name / "events.jsonl"
    file.parent.mkdir(exist_ok=True)
    records = [{"event": "Schema", "version": schema}, *map(to_record, events)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def plain(plans=PLANS):
    return [started(), *(measured(step, sizes) for step, sizes in enumerate(plans))]


def test_what_its_workers_took_is_what_others_are_compared_on(tmp_path):
    """At the recorded sizes the recorded times, by the file or the folder, under its name."""
    file = run(tmp_path, plain())
    for path in (file, file.parent):
        given = sim.read_trace(path)
        report = sim.run(Fixed((30, 10)), given.cluster(40), given.workload)

        assert given.name == "mine"
        assert given.slope_s.shape == (len(PLANS) - 1, 2)  # the first step warms up
        np.testing.assert_allclose(report.compute_s[-2:], [[0.05, 0.09]] * 2)


def test_fixed_costs_are_what_its_sizes_show(tmp_path):
    """So another size is not taken for proportional; they may be given instead."""
    given = sim.read_trace(run(tmp_path, plain()))
    report = sim.run("equal", given.cluster(40), given.workload)

    np.testing.assert_allclose(given.intercept_s, INTERCEPT_S, rtol=0.1)
    np.testing.assert_allclose(report.compute_s, [[0.04, 0.13]] * 7, rtol=0.05)
    assert sim.read_trace(run(tmp_path, plain()), intercept_s=0.0).intercept_s.tolist() == [0, 0]


def test_a_fit_never_takes_all_of_a_workers_shortest_step(tmp_path):
    """Jitter may make it shorter than the line that fits the others."""
    plans = [(20, 20)] * 4 + [(1, 39)] * 4
    events = [
        started(),
        *(measured(k, s, factor=0.2 if k == 5 else 1) for k, s in enumerate(plans)),
    ]
    given = sim.read_trace(run(tmp_path, events))

    assert (given.slope_s > 0).all()


@pytest.mark.parametrize(
    ("scenario", "policy"),
    slow_but(
        [("static", "equal"), ("drift", "auto"), ("burst", "dynamic-batching")],
        product(["static", "drift", "burst"], ["auto", "equal", "dynamic-batching"]),
    ),
)
def test_the_policy_that_was_recorded_makes_about_the_recorded_steps(tmp_path, scenario, policy):
    """Within 3 %, in the mean and in most steps: so what others would have made can be believed."""
    drawn = sim.scenario(scenario, world_size=4, num_steps=200, seed=3)
    ran = sim.run(policy, drawn.cluster(256), drawn.workload)
    events = [started(256, 4)]
    for step, (sizes, seconds) in enumerate(zip(ran.batch_size, ran.compute_s, strict=True)):
        one = replace(measured(step, (20, 20)), data_s=(0.0,) * 4, idle_s=(0.0,) * 4)
        events.append(
            replace(one, batch_size=tuple(sizes.tolist()), compute_s=tuple(seconds.tolist()))
        )
    given = sim.read_trace(run(tmp_path, events))
    again = sim.run(policy, given.cluster(256), given.workload)
    recorded_s = ran.compute_s.max(axis=1)[1:]

    assert again.step_s.mean() == pytest.approx(recorded_s.mean(), rel=0.03)
    assert np.median(abs(again.step_s / recorded_s - 1)) < 0.03


def test_steps_that_say_nothing_of_full_batches_are_left_out(tmp_path):
    """Short ones, those in which a worker had no samples, and those that were not measured."""
    plans = [(20, 20), (20, 20), (5, 2), (40, 0), (30, 10), (30, 10)]
    events = plain(plans)
    del events[2]  # of step 1; step 0 is the first
    events.insert(3, Rebalanced(4, 1, (30, 10), "why"))
    given = sim.read_trace(run(tmp_path, events))

    assert len(given.slope_s) == 2
    assert given.presence is None


def test_only_the_newest_run_of_a_file_counts(tmp_path):
    """Its workers may be others than those before, and a line that was cut short is left out."""
    file = run(tmp_path, [started(999, 1), *plain(), *plain()])
    file.write_text(file.read_text() + '{"event": "StepMea')

    assert sim.read_trace(file).slope_s.shape == (7, 2)


GOOD = to_record(measured(9, (20, 20)))
DAMAGED = {
    "no JSON": "{",
    "no event": "[1, 2]",
    "a row of a table": '{"step": 0, "worker": 0}',
    "times of one worker": GOOD | {"compute_s": [0.1]},
    "three workers": GOOD | {"batch_size": [1, 2, 37], "compute_s": [0.1] * 3},
    "no sizes": GOOD | {"batch_size": None},
    "NaN": GOOD | {"compute_s": [0.1, float("nan")]},
    "text": GOOD | {"compute_s": [0.1, "slow"]},
    "no text": "\udcff",
    "no version": {"event": "Schema"},
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_is_left_out_and_named_with_its_line(tmp_path, caplog, line):
    """And the rest is simulated."""
    file = run(tmp_path, plain())
    text = line if isinstance(line, str) else json.dumps(line)
    lines = file.read_text().splitlines()
    lines[5:5] = [text]
    file.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))

    with caplog.at_level(logging.WARNING, logger="evenstep"):
        given = sim.read_trace(file)

    assert given.slope_s.shape == (len(PLANS) - 1, 2)
    assert "1 damaged line is left out (line 6: " in caplog.text


def test_a_run_is_known_by_any_of_its_first_lines(tmp_path):
    """The very first may be the damaged one."""
    file = run(tmp_path, plain())
    file.write_text("x" + file.read_text())

    assert sim.read_trace(file).slope_s.shape == (len(PLANS) - 1, 2)


def test_the_future_is_refused(tmp_path):
    """Its fields may mean something else."""
    with pytest.raises(ValueError, match="line 1: schema 99"):
        sim.read_trace(run(tmp_path, plain(), schema=99))


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([started()], "hold a measured step"),
        ([started(), measured(0, (20, 20))], "hold a step of 40 samples, some for each worker"),
        ([started(), *[measured(k, (40, 0)) for k in range(3)]], "some for each worker, after"),
    ],
    ids=["no step", "one step", "no step with all"],
)
def test_a_run_that_says_too_little_is_refused(tmp_path, events, words):
    """With what would do."""
    with pytest.raises(ValueError, match=words):
        sim.read_trace(run(tmp_path, events))


def test_other_files_are_refused(tmp_path):
    """A folder without events, and a table with a number that no computer reads."""
    with pytest.raises(FileNotFoundError, match=r"events\.jsonl"):
        sim.read_trace(tmp_path)
    file = tmp_path / "table.jsonl"
    file.write_text('{"step": ' + "1" * 5000 + "}\n")
    with pytest.raises(ValueError, match="no event, an object"):
        sim.read_trace(file)


def test_fixed_costs_above_a_recorded_time_are_named_with_the_line(tmp_path):
    """As for tables."""
    with pytest.raises(ValueError, match=r"intercept_s.* in line 4 of events\.jsonl"):
        sim.read_trace(run(tmp_path, plain()), intercept_s=0.04)
