"""In training, a plan comes some steps after what it was made of: probes do not last that long."""

import pytest

from .networks import collocated, dedicated, followed_late, mbit

EQUAL, UNLIKE = mbit(100, 100, 100, 100), mbit(200, 200, 200, 50)
DELAYS = pytest.mark.parametrize("delay", [1, 2, 3, 5])


@DELAYS
def test_a_probe_of_equal_links_is_one_exchange(delay):
    """However late its result comes: until then there is all-reduce."""
    planner, is_shared = followed_late(collocated(), EQUAL, delay=delay)

    assert sum(is_shared) == 1
    assert planner.plan.parts is None
    assert "no gain" in planner.plan.reason


@DELAYS
def test_shares_that_promise_to_win_stay_until_it_is_known(delay):
    """The first exchange of a probe is by equal shares, and nothing is lost after it."""
    planner, is_shared = followed_late(collocated(), UNLIKE, delay=delay)
    first = is_shared.index(True)

    assert is_shared[first : first + delay] == [True] + [False] * (delay - 1)
    assert all(is_shared[first + delay :])
    assert planner.plan.num_exchanges is None


@DELAYS
def test_shares_that_promise_less_are_tried_once(delay):
    """Links that only look unlike should not cost more than that."""
    planner, is_shared = followed_late(collocated(), UNLIKE, delay=delay, factor=1.9)

    assert sum(is_shared) == 2
    assert planner.plan.parts is None


def test_servers_without_data_tell_of_an_exchange_when_the_next_begins():
    """So a probe of them goes on until its result is a plan."""
    _, is_shared = followed_late(dedicated(), mbit(*[100] * 4, *[400] * 4), delay=4)
    first = is_shared.index(True)

    assert all(is_shared[first : first + 4])


@DELAYS
def test_a_probe_that_cannot_be_read_ends_in_all_reduce(delay):
    """Where there is no exchange by shares any more to wait for."""
    planner, is_shared = followed_late(collocated(), UNLIKE, delay=delay, factor=float("nan"))

    assert sum(is_shared) <= delay
    assert planner.plan.parts is None
    assert planner.plan.reason == "plain all-reduce: no exchange of the probe could be read"
