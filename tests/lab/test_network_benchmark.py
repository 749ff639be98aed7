"""What the network's benchmark computes from what it measured."""

import pytest

from benchmarks._network_changing import EXCHANGES, means, part_of_gain, table
from benchmarks._network_follow import Timetable
from evenstep.lab import drawn_trace


def test_a_trace_as_a_table_has_all_rates_of_every_moment():
    """In the order of hosts, from each redraw on."""
    trace = drawn_trace(3, 45.0, seed=1, every_s=20.0)
    rows = table(trace, 3)
    assert [at_s for at_s, _ in rows] == [0.0, 20.0, 40.0]
    for change in trace:
        assert dict(rows)[change.at_s][change.host] == change.mbit.up_mbit


def test_the_part_of_a_gain():
    """1 is what the planner that knows the links saves, 0 what equal shares do."""
    seconds = {"knowing": (2.0, 3.0), "optimal": (2.5, 3.5), "equal": (4.0, 5.0)}
    run = [
        {"name": name, "draw": draw, "seconds": seconds.get(name, (9.0, 9.0))[draw]}
        for draw, number in ((0, 3), (1, 1))
        for name in EXCHANGES.names
        for _ in range(number)
    ]
    mean_s = means(run, first=1, field="seconds")

    others = dict.fromkeys(EXCHANGES.names, 9.0)
    assert mean_s == {**others, "knowing": 2.5, "optimal": 3.0, "equal": 4.5}
    assert part_of_gain(mean_s, "optimal") == pytest.approx(0.75)
    assert part_of_gain(mean_s, "equal") == 0
    assert part_of_gain(mean_s, "static") < 0


def test_everybody_has_each_draw_for_as_long():
    """One after the other, another one first in each draw; the lead belongs to nobody."""
    turns = Timetable(("a", "b", "c"), lead_s=10.0, turn_s=2.0, num_draws=2)
    names = [turns.at(10.0 + 2 * turn + 0.5) for turn in range(6)]

    assert names == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]
    assert turns.at(0.0) == (0, "a")
    assert turns.at(22.1) is None
