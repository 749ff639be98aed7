"""What evenstep adds to a step, as counts: bounds that only fall. No time is asserted."""

import json
from functools import cache
from statistics import median

import pytest

from benchmarks._parity_loops import Cell
from benchmarks._parity_measures import Effort, count_graphs, measure
from benchmarks._parity_page import EVIDENCE, PAGE, page, table
from benchmarks.parity import COMPILED, at_ranks, grid

from .._tiers import slow_but

pytestmark = pytest.mark.cluster

EFFORT = Effort(warm=10, pairs=2, block=3, counted=40)
# Calls of a step on the thread that trains, and files that most of its steps pass through. Lower
# them; never raise them. They are those of the step with the fewest: on a busy machine steps wait
# for a plan, which takes ten calls, and take so long that one process plans in each. 2 % to spare.
MOST = {
    Cell("DDP", 1, 0.005): (129, 27),
    Cell("DDP", 2, 0.020): (60, 21),
    Cell("DDP", 2, 0.020, num_workers=2): (59, 20),
    Cell("FSDP2", 2, 0.020): (67, 25),  # three collectives of its one layer are clocked
}
ALONE = next(iter(MOST))
MOST_BUSY = 180  # of half of the steps, on a machine whose cores have something else to do
MOST_EVER = 2000  # of any step: several plans are made at once


def found_in(rank, store, todo):
    """What a rank finds in each cell, and in a compiled one if there are others."""
    graphs = count_graphs(rank, store, COMPILED) if todo[0][0].num_ranks > 1 else None
    return measure(rank, store, todo), graphs


@pytest.fixture(scope="module")
def ranks():
    """What each rank finds, by how many there are: one process for all cells of a rank."""

    @cache
    def measured(num):
        cells = [(cell, EFFORT) for cell in MOST if cell.num_ranks == num]
        return at_ranks(num, found_in, cells)

    return measured


@pytest.fixture
def found(ranks, cell):
    """What each rank finds in a cell."""
    number = [other for other in MOST if other.num_ranks == cell.num_ranks].index(cell)
    return [cells[number] for cells, _ in ranks(cell.num_ranks)]


@pytest.mark.parametrize("cell", slow_but([ALONE], MOST), ids=lambda cell: cell.name)
def test_a_step_makes_no_more_calls_than_before(found, cell):
    """Counted as in the benchmark, which has 200 steps; on the rank with the most."""
    counts = [one["calls"]["calls"] for one in found]
    least = max(map(min, counts))
    half, most = max(map(median, counts)), max(map(max, counts))
    files = max(one["calls"]["fewest"] for one in found)
    print(f"{cell.name}: {least} calls, {half} in half of the steps, {most}; {files} files")

    assert 0 < least <= MOST[cell][0]
    assert half <= MOST_BUSY or cell == ALONE
    assert most <= MOST_EVER
    assert files <= MOST[cell][1]


@pytest.mark.parametrize("cell", slow_but([ALONE], MOST), ids=lambda cell: cell.name)
def test_losses_are_those_of_plain_training(found, cell):
    """Bit by bit, on every rank, with sizes that stay equal."""
    assert all(one["losses_equal"] for one in found)


@pytest.mark.slow
def test_a_compiled_model_has_no_other_graphs(ranks):
    """As many as in plain training, as few breaks, and the same losses."""
    for _, loops in ranks(COMPILED.num_ranks):
        assert loops["other"] == loops["plain"]
        assert (loops["other"]["graphs"], loops["other"]["breaks"]) == (1, 0)


def test_the_page_says_what_the_file_says():
    """The table is made from the file, which has every cell of the grid."""
    kept, text = json.loads(EVIDENCE.read_text("utf-8")), PAGE.read_text("utf-8")
    lines = {(cell.wrapper, cell.num_ranks, cell.step_s) for cell in grid()}

    assert page(text, kept) == text
    assert {cell.name for cell in grid()} <= {row["what"] for row in kept["rows"]}
    assert len(table(kept["rows"])) > len(lines)
