"""Traces: values, and how they are carried out."""

import math
import threading

import numpy as np
import pytest

from evenstep.lab import Change, Trace, drawn_trace
from evenstep.lab._lab import Player


def test_a_trace_is_sorted_and_names_hosts_that_are_there():
    """Both are refused where it is made or used, not where it would be carried out."""
    early, late = Change(1.0, 0, mbit=5), Change(2.0, 3, cpus=0.5)
    with pytest.raises(ValueError, match="sorted by time"):
        Trace([late, early])
    with pytest.raises(ValueError, match="at least one change"):
        Trace([])
    for wrong, words in (
        ({"at_s": -1.0, "mbit": 5}, "at least 0"),
        ({"at_s": math.inf, "mbit": 5}, "finite"),
        ({"at_s": 0.0}, "one at least"),
        ({"at_s": 0.0, "mbit": 0}, "from 0.1 to 10000"),
    ):
        with pytest.raises(ValueError, match=words):
            Change(host=0, **wrong)
    trace = Trace([early, late])
    trace.check(4)

    assert trace.num_hosts == 4
    with pytest.raises(ValueError, match=r"below 3, .* got 3"):
        trace.check(3)


def test_drawn_rates_are_even_in_their_bounds_and_the_seed_s():
    """Redrawn every 20 s for every host; the same seed gives the same trace."""
    trace = drawn_trace(4, 4000.0, seed=3)
    rates = np.array([change.mbit.up_mbit for change in trace.changes])

    assert trace == drawn_trace(4, 4000.0, seed=3)
    assert trace != drawn_trace(4, 4000.0, seed=4)
    assert [change.at_s for change in trace.changes[::4]] == [20.0 * i for i in range(200)]
    assert [change.host for change in trace.changes] == [0, 1, 2, 3] * 200
    assert all(change.mbit.up_mbit == change.mbit.down_mbit for change in trace.changes)
    assert 20 <= rates.min() < 21
    assert 154 < rates.max() <= 155
    assert rates.mean() == pytest.approx(87.5, abs=4)  # 3 of its standard deviations


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hosts": 0},
        {"duration_s": 0.0},
        {"every_s": math.inf},
        {"least_mbit": 0.0},
        {"least_mbit": 200.0},
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong):
    """With the argument's name."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        drawn_trace(**{"num_hosts": 2, "duration_s": 60.0, "seed": 0} | wrong)


class Written:
    """Stands where a lab does, and writes down what it is told."""

    def __init__(self, fail_on=None, num_told=None):
        self.told, self.fail_on, self.enough = [], fail_on, threading.Event()
        self.num_told = num_told

    def set_mbit(self, host, mbit):
        if host == self.fail_on:
            self.enough.set()
            raise OSError("the link is gone")
        self.note(host, "mbit", mbit.up_mbit)

    def set_cpus(self, host, cpus):
        self.note(host, "cpus", cpus)

    def note(self, *told):
        self.told.append(told)
        if len(self.told) == self.num_told:
            self.enough.set()


def test_a_trace_is_carried_out_in_its_order():
    """What it has at 0 before anything else goes on, the rest while it does."""
    lab = Written(num_told=4)
    trace = Trace(
        [Change(0, 1, mbit=5, cpus=0.3), Change(0.01, 0, mbit=7), Change(0.02, 0, cpus=0.6)]
    )
    with Player(lab, trace):
        first = lab.told[:2]
        assert lab.enough.wait(30)

    assert first == [(1, "mbit", 5.0), (1, "cpus", 0.3)]
    assert lab.told[2:] == [(0, "mbit", 7.0), (0, "cpus", 0.6)]


def test_a_trace_ends_with_what_it_accompanies():
    """Nothing is changed afterwards, and nobody waits for the rest of it."""
    lab = Written()
    with Player(lab, Trace([Change(3600, 0, mbit=5)])):
        pass

    assert lab.told == []
    assert not [each for each in threading.enumerate() if each.name == "evenstep-lab-trace"]


def test_a_change_that_fails_is_not_kept_quiet():
    """Raised at the end, or added to the error that ended it."""
    trace = Trace([Change(0.001, 0, mbit=5)])

    def play(then):
        lab = Written(fail_on=0)
        with Player(lab, trace):
            assert lab.enough.wait(30)
            then()

    with pytest.raises(OSError, match="the link is gone"):
        play(lambda: None)
    with pytest.raises(ZeroDivisionError) as caught:
        play(lambda: 1 / 0)
    assert "the link is gone" in caught.value.__notes__[0]
