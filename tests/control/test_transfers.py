"""What went from rank to rank, as one exchange of known length."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.control import Transfers
from evenstep.sharding import Aggregation, Links
from evenstep.sim import play_exchange


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
