"""A recorded run is a trace: read as it was recorded, or refused by its line."""

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

HEADER = "step,worker,seconds,samples"
ROWS = ["5,0,0.2,10", "5,1,0.3,30", "6,1,0.6,30", "6,0,0.1,10"]


def write(folder, lines, name="trace.csv"):
    file = folder / name
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_a_run_at_the_recorded_sizes_takes_the_recorded_times(tmp_path):
    """Whatever part of them is a fixed cost."""
    file = write(tmp_path, [HEADER, *ROWS])
    for fixed_s in (0.0, 0.05, np.array([0.02, 0.1])):
        given = sim.read_trace(file, intercept_s=fixed_s)
        report = sim.run(Fixed((10, 30)), given.cluster(40), given.workload)

        assert given.name == "trace"
        assert given.presence is None
        np.testing.assert_allclose(report.compute_s, [[0.2, 0.3], [0.1, 0.6]])


def test_order_of_columns_and_blank_lines_say_nothing(tmp_path):
    """Spaces neither."""
    table = sim.read_trace(write(tmp_path, [HEADER, *ROWS[:2], "", *ROWS[2:]]))
    other = [
        "samples,step,seconds,worker",
        "10,5,0.2,0",
        "30,5, 0.3, 1",
        "30,6,0.6,1",
        "10,6,0.1,0",
    ]
    turned = sim.read_trace(write(tmp_path, other, "turned.csv"))

    assert np.array_equal(table.slope_s, [[0.02, 0.01], [0.01, 0.02]])
    assert np.array_equal(table.slope_s, turned.slope_s)


def test_a_mark_of_byte_order_is_no_part_of_the_first_name(tmp_path):
    """As spreadsheets begin text in UTF-8 with."""
    file = write(tmp_path, [HEADER, *ROWS], "marked.csv")
    plain = sim.read_trace(file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())

    assert np.array_equal(sim.read_trace(file).slope_s, plain.slope_s)


def test_who_has_no_row_was_not_there(tmp_path):
    """A worker that joins, and one that vanishes for a step; columns by number, not by place."""
    rows = ["0,7,0.2,10", "1,7,0.2,10", "1,2,0.4,10", "2,2,0.4,10", "3,2,0.4,10", "3,7,0.2,10"]
    given = sim.read_trace(write(tmp_path, [HEADER, *rows]))
    report = sim.run("equal", given.cluster(20), given.workload)

    assert given.presence.astype(int).tolist() == [[0, 1], [1, 1], [1, 0], [1, 1]]
    assert report.batch_size.tolist() == [[0, 20], [10, 10], [20, 0], [10, 10]]
    assert report.restarts == (1, 2, 3)
    np.testing.assert_allclose(report.step_s, [0.4, 0.4, 0.8, 0.4])


@pytest.mark.parametrize(
    ("rows", "line", "match"),
    [
        (["0,0,1,1", "2,0,1,1"], 3, "leave out no step"),
        (["1,0,1,1", "0,0,1,1"], 3, "sorted"),
        (["0,0,1,1", "0,0,1,1"], 3, "worker 0 in step 0, as in line 2"),
        (["0,0,1,1", "0,1,-1,1"], 3, "seconds"),
        (["0,0,0,1"], 2, "seconds"),
        (["0,0,nan,1"], 2, "seconds"),
        (["0,0,inf,1"], 2, "seconds"),
        (["0,0,,1"], 2, "seconds"),
        (["0,0,fast,1"], 2, "seconds"),
        (["0,0,1,0"], 2, "samples"),
        (["0,0,1,1.5"], 2, "samples"),
        (["0,-1,1,1"], 2, "worker"),
        (["0,host,1,1"], 2, "worker"),
        (["x,0,1,1"], 2, "step"),
        (["0,0,1,1", "0,1,1"], 3, "4 values"),
        (["0,0,1,1", "0,1,1,1,1"], 3, "4 values"),
        ([], 1, "one row"),
        (['0,0,1,"1'], 2, "CSV"),
    ],
)
def test_a_bad_line_is_named(tmp_path, rows, line, match):
    """With what is wrong in it."""
    file = write(tmp_path, [HEADER, *rows])

    with pytest.raises(ValueError, match=match) as error:
        sim.read_trace(file)
    assert f"in line {line} of trace.csv" in str(error.value)


@pytest.mark.parametrize(
    "header",
    [
        "step,worker,seconds",
        "step,worker,seconds,samples,host",
        "step,worker,seconds,samples,step",
        "",
    ],
)
def test_other_columns_are_refused(tmp_path, header):
    """Those that are missing, those that nobody knows, and those that stand there twice."""
    with pytest.raises(ValueError, match=r"each once and no others.* in line 1"):
        sim.read_trace(write(tmp_path, [header, *ROWS]))


def test_other_files_are_refused(tmp_path):
    """By their ending, or by what they hold."""
    with pytest.raises(ValueError, match=r"end in \.csv"):
        sim.read_trace(write(tmp_path, [HEADER, *ROWS], "trace.txt"))
    (tmp_path / "trace.csv").write_bytes(b"step,worker\xff")
    with pytest.raises(ValueError, match="UTF-8"):
        sim.read_trace(tmp_path / "trace.csv")
    with pytest.raises(FileNotFoundError):
        sim.read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize("value", [-0.1, np.nan, np.zeros(3)])
def test_fixed_costs_that_cannot_be_are_refused(tmp_path, value):
    """One number, or one per worker, of at least 0."""
    with pytest.raises(ValueError, match="intercept_s"):
        sim.read_trace(write(tmp_path, [HEADER, *ROWS]), intercept_s=value)


def test_a_step_cannot_be_shorter_than_its_fixed_cost(tmp_path):
    """The line that says so is named."""
    with pytest.raises(ValueError, match=r"intercept_s.*in line 5 of trace.csv"):
        sim.read_trace(write(tmp_path, [HEADER, *ROWS]), intercept_s=0.1)


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


def test_other_files_of_a_run_are_refused(tmp_path):
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
