"""A recorded run tells what its workers need, or says why it does not."""

import json
import logging

import numpy as np
import pytest

from evenstep._telemetry import JsonLines
from evenstep.advice import read_run
from evenstep.events import MemoryCapped, Rebalanced, RunStarted, StepMeasured, to_record

INTERCEPT_S, SLOPE_S = np.array([0.05, 0.1, 0.02]), np.array([0.001, 0.002, 0.008])


def started(world_size=3, total=96):
    hosts, devices = ("a",) * world_size, tuple(f"cuda:{rank}" for rank in range(world_size))
    return RunStarted(world_size, total, 100, "Auto()", hosts, devices)


def measured(step, sizes, *, factor=1.0, overhead_s=0.03, before_s=None):
    compute_s = factor * (INTERCEPT_S + SLOPE_S * np.array(sizes))
    slowest_s = float(compute_s.max())
    return StepMeasured(
        step,
        0,
        tuple(sizes),
        tuple(compute_s.tolist()),
        (0.0,) * 3,
        tuple((slowest_s - compute_s).tolist()),
        slowest_s,
        0.1,
        None,
        None,
        None if before_s is None else before_s + overhead_s,
    )


def steps(plans, **options):
    before_s, found = None, []
    for step, sizes in enumerate(plans):
        found.append(measured(step, sizes, before_s=before_s, **options))
        before_s = found[-1].makespan_s
    return found


def write(folder, *events):
    sink = JsonLines(folder / "events.jsonl")
    for event in events:
        sink(event)
    sink.close()
    return folder


PLANS = [(32, 32, 32)] * 3 + [(60, 28, 8)] * 4 + [(64, 25, 7)] * 4


def test_the_lines_of_the_workers_are_found(tmp_path):
    """Fixed cost, cost per sample, what is not computing, who they are."""
    found = read_run(write(tmp_path, started(), *steps(PLANS)))

    np.testing.assert_allclose(found.times.slope_s, SLOPE_S, rtol=0.05)
    np.testing.assert_allclose(found.times.intercept_s, INTERCEPT_S, atol=0.01)
    assert found.overhead_s == pytest.approx(0.03)
    assert found.names == ("a cuda:0", "a cuda:1", "a cuda:2")
    assert (found.global_batch_size, found.num_steps) == (96, len(PLANS) - 1)
    assert found.is_line_known.all()
    assert found.max_batch_size is None


def test_overhead_is_of_the_step_before(tmp_path):
    """A batch comes when the step before is over: its computing is what it is compared with."""
    found = read_run(write(tmp_path, started(), *steps([(32, 32, 32), (60, 28, 8)] * 2)))

    assert found.overhead_s == pytest.approx(0.03)


def test_the_file_may_be_given_itself(tmp_path):
    """As people copy it from a machine."""
    write(tmp_path, started(), *steps(PLANS))

    assert read_run(tmp_path / "events.jsonl").global_batch_size == 96


def test_a_slow_first_step_leaves_no_trace(tmp_path):
    """Kernels are chosen in it, memory is found: training passes it over too."""
    slow = measured(0, PLANS[0], factor=30.0)
    found = read_run(write(tmp_path, started(), slow, *steps(PLANS)[1:]))

    np.testing.assert_allclose(found.times.slope_s, SLOPE_S, rtol=0.05)


def test_one_size_is_said_to_tell_no_fixed_cost(tmp_path):
    """All of the time is then taken for samples."""
    found = read_run(write(tmp_path, started(), *steps([(32, 32, 32)] * 5)))

    assert not found.is_line_known.any()
    np.testing.assert_allclose(found.times.intercept_s, 0, atol=1e-9)


def test_only_the_last_start_counts(tmp_path):
    """The workers before it may have been others, and their caps as well."""
    before = [started(2), MemoryCapped(3, 0, 7, 1), started(3, 48)]
    found = read_run(write(tmp_path, *before, *steps(PLANS), MemoryCapped(9, 2, 20, 1)))

    assert found.global_batch_size == 48
    assert found.max_batch_size.tolist() == [48, 48, 20]


def test_caps_in_tokens_are_no_caps_of_samples(tmp_path):
    """As of a run by cost."""
    capped = MemoryCapped(9, 2, 20, 1, unit="size")
    found = read_run(write(tmp_path, started(3, 48), *steps(PLANS), capped))

    assert found.max_batch_size is None


def test_caps_of_one_forward_are_no_caps_of_a_batch(tmp_path):
    """In a loop that takes micro-batches; of the newest run, as the one before may not have."""
    capped, plan = MemoryCapped(0, 1, 16, 1), Rebalanced(1, 1, (32, 32, 32), "why", (32, 16, 32))
    parts = write(tmp_path, started(), capped, plan, *steps(PLANS), MemoryCapped(9, 2, 20, 1))
    assert read_run(parts).max_batch_size is None

    whole = [started(), capped, Rebalanced(1, 1, (40, 16, 40), "why"), *steps(PLANS)]
    found = read_run(write(tmp_path, started(), plan, *whole))
    assert found.max_batch_size.tolist() == [96, 16, 96]


def test_a_run_without_steps_is_refused(tmp_path):
    """With the way to one."""
    with pytest.raises(ValueError, match=r"hold a measured step.*run_dir"):
        read_run(write(tmp_path, started()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compute_s": [0.1, 0.1, -1.0]}, "Expected `float` >= 0.0 - at `$.compute_s[2]`"),
        ({"compute_s": [0.1, 0.1, 0.0]}, "positive for"),
        ({"compute_s": [0.1, 0.1]}, "speak of 3 ranks, got 2"),
        ({"batch_size": [1, 2, 3, 4], "compute_s": [0.1] * 4}, "speak of 3 ranks, got 4"),
        ({"batch_size": None}, "Expected `array`, got `null` - at `$.batch_size`"),
    ],
)
def test_steps_that_cannot_be_are_left_out(tmp_path, caplog, change, words):
    """With a word on the first; the others are estimated from."""
    file = write(tmp_path, started(), *steps(PLANS)) / "events.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[-1] |= change
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    with caplog.at_level(logging.WARNING, logger="evenstep"):
        found = read_run(file)

    assert found.num_steps == len(PLANS) - 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert "1 damaged line is left out (line 13: " in said
    assert words in said


def test_a_worker_that_never_had_samples_is_named(tmp_path):
    """Nothing can be said of it."""
    with pytest.raises(ValueError, match="nothing of rank 2"):
        read_run(write(tmp_path, started(), *steps([(90, 6, 0)] * 3)))


@pytest.mark.parametrize("line", ["[1]", '{"step": 3}', "3", "\x1f\x8b\x08\x00"])
def test_a_file_of_something_else_is_named(tmp_path, line):
    """It may be another program's, or packed."""
    file = tmp_path / "other.jsonl"
    file.write_text((line + "\n") * 5)

    with pytest.raises(ValueError, match=r"`read_run\(path=...\)`: .*other.jsonl must hold the ev"):
        read_run(file)


@pytest.mark.slow
def test_the_newest_of_very_many_steps_count(tmp_path):
    """A long run has more of them than fit into memory."""
    line = json.dumps(to_record(measured(0, PLANS[0]))) + "\n"
    file = write(tmp_path, started()) / "events.jsonl"
    with file.open("a") as lines:
        lines.write(line * 20_010)

    assert read_run(file).num_steps == 20_000 - 1
