"""What went from rank to rank, as one exchange of known length."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import Aggregation, Links
from evenstep.network._following._link_tracker import Transfers
from evenstep.network.sim._played import play_exchange


def slowest_s(transfers):
    """Seconds of the slowest rank, either way, by the summed rates of its transfers."""
    slowest = 0.0
    for num_bytes, seconds in (
        (transfers.num_bytes, transfers.seconds),
        (transfers.num_bytes.T, transfers.seconds.T),
    ):
        for row, taken in zip(num_bytes, seconds, strict=True):
            seen = row > 0
            if seen.any():
                slowest = max(slowest, row[seen].sum() / (row[seen] / taken[seen]).sum())
    return slowest


def drawn(seed, size=4):
    """Any transfers, some of them none."""
    random = np.random.default_rng(seed)
    num_bytes = random.uniform(1e3, 1e6, (size, size)) * (random.random((size, size)) < 0.7)
    np.fill_diagonal(num_bytes, 0.0)
    return Transfers(num_bytes, np.where(num_bytes > 0, random.uniform(0.01, 2.0, (size, size)), 0))


@given(st.integers(0, 1000), st.floats(0.01, 10))
def test_the_slowest_rank_takes_as_long_as_the_exchange(seed, exchange_s):
    """All rates change by one factor, bytes stay, and once is enough."""
    before = drawn(seed)
    after = before.lasting(exchange_s)
    if not before.num_bytes.any():
        assert after is before
        return
    assert slowest_s(after) == pytest.approx(exchange_s)
    np.testing.assert_array_equal(after.num_bytes, before.num_bytes)
    seen = before.seconds > 0
    factors = after.seconds[seen] / before.seconds[seen]
    np.testing.assert_allclose(factors, factors[0])
    np.testing.assert_allclose(after.lasting(exchange_s).seconds, after.seconds)


def test_without_transfers_there_is_nothing_to_scale():
    """Gradients so small that one rank summed all of its own, say."""
    nothing = Transfers(np.zeros((2, 2)), np.zeros((2, 2)))
    assert nothing.lasting(1.0) is nothing


def test_transfers_one_after_the_other_tell_the_same_as_all_at_once():
    """Each with the whole link for a third of the time, or with a third of it throughout."""
    num_bytes = 1e6 * (1 - np.eye(4))
    at_once = Transfers(num_bytes, np.where(num_bytes > 0, 3.0, 0.0)).lasting(3.0)
    in_turn = Transfers(num_bytes, np.where(num_bytes > 0, 1.0, 0.0)).lasting(3.0)
    np.testing.assert_allclose(in_turn.seconds, at_once.seconds)


def test_what_is_known_exactly_hardly_changes():
    """Links that are shared fairly, one of them slow: its transfers take the exchange's time."""
    aggregation = Aggregation(4, 8_000_000, num_chunks=64)
    links = Links(np.array([25e6, 25e6, 25e6, 6e6]))
    done = play_exchange(aggregation, links, np.full(4, 0.25))
    after = done.transfers.lasting(done.exchange_s)
    seen = after.seconds > 0
    np.testing.assert_allclose(after.seconds[seen], done.transfers.seconds[seen], rtol=0.02)


def test_what_links_certainly_carried():
    """All of it over the sum of the times, or over all of the exchange if that is less."""
    num_bytes = np.array([[0, 8, 8], [0, 0, 0], [2, 2, 0]], np.float64)
    done = Transfers(num_bytes, np.array([[0, 4, 4], [0, 0, 0], [1, 1, 0]], np.float64))
    up, down = done.sustained()

    assert done.moved()[0].tolist() == [16, 0, 4]
    assert up.tolist() == [4, 0, 2]  # the first two at once, in four seconds; then one by one
    assert down.tolist() == [2, 2.5, 2]


ROWS = [
    (0, 2, 600, 3.0),
    (1, 2, 600, 3.0),
    (2, 2, 1200, 4.0),  # 6 seconds of ways in 4 of the link
    (2, 0, 300, 1.0),
    (2, 1, 300, 2.0),
    (0, 0, 300, 1.0),
    (1, 1, 300, 2.0),
]


def test_a_rank_tells_for_how_long_its_link_was_in_use():
    """What it sent is taken to overlap as what came, and half to take as long: 6 s of ways in 4."""
    done = Transfers.from_rows(3, ROWS)
    overlapping_s, as_what_came_s = np.array([3, 3, 3 / 1.5]), np.array([2, 4, 2])

    assert done.num_bytes.trace() == done.seconds.trace() == 0
    assert done.busy_s[1].tolist() == [1, 2, 4]
    np.testing.assert_allclose(done.busy_s[0], np.sqrt(overlapping_s * as_what_came_s))
    np.testing.assert_allclose(done.carried(1)[0], [600, 600, 600] / done.busy_s[0])
    assert done.carried(1)[1].tolist() == [300, 150, 300]
    assert done.carried(601).tolist() == [[0, 0, 0], [0, 0, 300]]
    assert done.lasting(100.0).busy_s is done.busy_s


def test_nothing_is_made_up_where_nobody_tells():
    """Neither of a rank to which nothing came, nor of all of them."""
    silent = Transfers.from_rows(3, [row for row in ROWS if row[0] != row[1]])
    partly = Transfers.from_rows(3, [row for row in ROWS if row[:2] != (1, 1)])

    assert silent.busy_s is None
    assert not silent.carried(1).any()
    assert partly.carried(1)[:, 1].tolist() == [0, 0]
    assert (partly.carried(1)[:, 0] > 0).all()


@pytest.mark.parametrize("wrong", [np.nan, -1.0, np.inf])
def test_times_of_links_that_cannot_be_are_named(wrong):
    """By the rank whose link it is."""
    done = Transfers.from_rows(3, ROWS)
    assert done.problem() is None
    done.busy_s[1, 2] = wrong
    assert done.problem() == (2, f"links in use for [2.0, {wrong}] s")


def test_times_of_links_have_a_row_per_direction():
    """The error says which shape."""
    with pytest.raises(ValueError, match=r"busy_s=...\)` must have shape \(2, 3\), got \(3,\)"):
        Transfers(np.zeros((3, 3)), np.zeros((3, 3)), np.zeros(3))
