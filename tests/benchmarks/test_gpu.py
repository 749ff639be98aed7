"""The benchmark of accelerators, on a CPU: what needs no card of it is right, and the rest runs."""

from time import perf_counter, sleep

import numpy as np
import pytest
import torch

from benchmarks._gpu_cell import answered
from benchmarks._gpu_device import device_of, spread, timed
from benchmarks._gpu_fits import cost_errors, fit_errors, memory_errors
from benchmarks._gpu_steps import first_size, lateness
from benchmarks.gpu import row

SIZES = np.array((1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64))


@pytest.mark.parametrize(
    ("seconds", "exact"),
    [
        (0.01 + 0.002 * SIZES, {"affine", "piecewise", "table"}),
        (0.01 + 0.002 * np.maximum(SIZES - 8, 0), {"piecewise"}),
    ],
    ids=["line", "flat, then a line"],
)
def test_a_model_of_the_right_kind_foretells_sizes_that_were_left_out(seconds, exact):
    """And its error is that at those sizes, not at the ones that it was fitted to."""
    errors = fit_errors(SIZES, seconds)

    found = {name for name, error in errors.items() if error["between"]["max"] < 1e-6}
    assert found >= exact
    assert errors["piecewise"]["beyond"]["max"] < 1e-6
    assert errors["table"]["beyond"] is None


def test_a_wrong_kind_is_seen_to_err():
    """A line through a curve that is flat and then rises misses sizes that were left out."""
    errors = fit_errors(SIZES, 0.01 + 0.002 * np.maximum(SIZES - 8, 0))

    assert errors["affine"]["between"]["max"] > 0.02


def test_what_is_left_out_has_no_part_in_the_fit():
    """A freak at such a size is off by what it is, and all others are foretold as before."""
    line = 0.01 + 0.002 * SIZES
    inner = range(1, len(SIZES) - 1)
    freaks = [np.where(SIZES[index] == SIZES, 1.5 * line, line) for index in inner]
    errors = [fit_errors(SIZES, seconds)["affine"]["between"]["max"] for seconds in freaks]

    assert sum(error == pytest.approx(1 / 3) for error in errors) == len(inner) // 3


def test_cost_beats_count_where_lengths_differ():
    """Times that grow with the square of the length are foretold by cost alone."""
    sizes, lengths = (grid.ravel() for grid in np.meshgrid([1, 2, 4, 8], [64, 128, 256, 512]))
    seconds = 0.005 + sizes * (1e-5 * lengths + 1e-7 * lengths**2)
    errors = cost_errors(sizes, lengths, seconds)

    assert errors["by_cost"]["max"] < 0.01
    assert errors["by_count"]["max"] > 0.1


def test_memory_that_keeps_to_a_line_is_foretold_and_capped_below_it():
    """The cap is for the memory that the largest size took, and is below that size."""
    errors = memory_errors(SIZES, 1_000_000 + 50_000 * SIZES)

    assert errors["line"]["max"] < 1e-9
    assert errors["bytes_per_sample"] == pytest.approx(50_000)
    assert 0.7 < errors["cap_over_largest"] <= 1
    assert memory_errors(SIZES, 0 * SIZES) is None


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_lateness_is_that_of_the_plan_in_force(lag):
    """Of plans that each know of the step so many before, also over the wrap of their sizes."""
    total, world_size, num_steps = 16, 2, 60
    sizes = [first_size(max(k - lag + 1, 0), total, world_size) for k in range(num_steps)]
    measured = {k - lag + 1: sizes[k - lag] for k in range(lag, num_steps)}

    assert lateness(sizes, measured, total, world_size) == {lag: num_steps - 5}


def test_work_is_timed_and_what_follows_it_is_not():
    """Such as an optimizer's step: its time lies outside of all that is told."""
    calls = []

    def after():
        calls.append("after")
        sleep(0.02)

    began_s = perf_counter()
    seconds = timed(lambda: calls.append("work"), torch.device("cpu"), 3, after)
    wall_s = perf_counter() - began_s

    assert calls == ["work", "after"] * 3
    assert len(seconds) == 3
    assert sum(seconds) <= wall_s - 3 * 0.02


def test_a_spread_is_of_quartiles():
    """With the number that it is of."""
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "q1": 1.5, "q3": 2.5, "num": 3}


def test_a_device_that_is_not_there_is_refused():
    """A file that says CUDA is never of a CPU."""
    with pytest.raises(SystemExit, match="--device auto"):
        device_of("no such device")


def test_what_a_machine_lacks_is_said():
    """A cell for other machines says why it was not run, and misses no bar."""
    found = answered("graph", "cpu", quick=True)
    told = row("graph", {"status": "not run", "reason": found["not_run"]})

    assert "this is cpu" in found["not_run"]
    assert told.met is None
    assert told.measured == {"not run": found["not_run"]}


def test_a_cell_that_failed_misses_its_bar():
    """With the end of its error, so that the status of the benchmark says so."""
    told = row("hang", {"status": "failed", "error": "exit status 1\nOSError: no such card\n"})

    assert told.met is False
    assert told.measured["error"].endswith("OSError: no such card")
