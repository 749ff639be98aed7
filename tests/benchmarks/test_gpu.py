"""The benchmark of accelerators, on a CPU: what needs no card of it is right, and the rest runs."""

import pytest

from benchmarks._gpu_cell import CELLS, answered
from benchmarks._gpu_device import Effort, NotRun, device_of, spread
from benchmarks._gpu_steps import first_size, lateness
from benchmarks.gpu import row


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_lateness_is_that_of_the_plan_in_force(lag):
    """Of plans that each know of the step so many before, also over the wrap of their sizes."""
    total, world_size, num_steps = 16, 2, 60
    sizes = [first_size(max(k - lag + 1, 0), total, world_size) for k in range(num_steps)]
    measured = {k - lag + 1: sizes[k - lag] for k in range(lag, num_steps)}

    assert lateness(sizes, measured, total, world_size) == {lag: num_steps - 5}


def test_a_spread_is_of_quartiles():
    """With the number that it is of."""
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "q1": 1.5, "q3": 2.5, "num": 3}


def test_a_device_that_is_not_there_is_refused():
    """A file that says CUDA is never of a CPU."""
    with pytest.raises(SystemExit, match="--device auto"):
        device_of("no such device")


def test_what_a_machine_lacks_is_said():
    """A cell for other machines says why it was not run, and misses no bar."""
    with pytest.raises(NotRun, match="no accelerator"):
        CELLS["beside-cpu"].ask(device_of("cpu"), Effort(small=False))
    told = row("beside-cpu", {"status": "not run", "reason": "no accelerator"})

    assert told.met is None
    assert told.measured == {"not run": "no accelerator"}


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_runs_on_a_cpu(cell):
    """In small sizes: what runs here runs on a card, but for what a card is like."""
    found = answered(cell, "cpu", quick=True)

    assert "headline" in found
    assert found.get("met") in (True, None)


def test_a_cell_that_failed_misses_its_bar():
    """With the end of its error, so that the status of the benchmark says so."""
    told = row("hang", {"status": "failed", "error": "exit status 1\nOSError: no such card\n"})

    assert told.met is False
    assert told.measured["error"].endswith("OSError: no such card")
