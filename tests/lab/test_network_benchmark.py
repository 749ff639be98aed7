"""What the network's benchmark computes from what it measured."""

import pytest

from benchmarks._network_changing import part_of_gain, table, totals
from evenstep.lab import drawn_trace


def test_a_trace_as_a_table_has_all_rates_of_every_moment():
    """In the order of hosts, from each redraw on."""
    trace = drawn_trace(3, 45.0, seed=1, every_s=20.0)
    rows = table(trace, 3)
    assert [at_s for at_s, _ in rows] == [0.0, 20.0, 40.0]
    for change in trace.changes:
        assert dict(rows)[change.at_s][change.host] == change.mbit.up_mbit


def test_the_part_of_a_gain():
    """1 is what the planner that knows the links saves, 0 what equal shares do."""
    run = [
        {"equal": {"seconds": 9.0}, "knowing": {"seconds": 9.0}, "optimal": {"seconds": 19.0}},
        {"equal": {"seconds": 4.0}, "knowing": {"seconds": 2.0}, "optimal": {"seconds": 2.5}},
    ]
    seconds = totals(run, first=1)
    assert seconds == {"equal": 4.0, "knowing": 2.0, "optimal": 2.5}
    assert part_of_gain(seconds, "optimal") == pytest.approx(0.75)
    assert part_of_gain(seconds, "equal") == 0
    assert part_of_gain(totals(run, first=0), "optimal") < 0
