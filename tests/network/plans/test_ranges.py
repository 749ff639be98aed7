"""Ranges of bytes, against the rule carried out one share at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import Aggregation, byte_edges


def kept_one_by_one(shares, num_bytes, min_bytes):
    """The ranks that are left once the smallest shares that are too small went, one at a time."""
    kept = [rank for rank, share in enumerate(shares) if share > 0]
    while len(kept) > 1:
        total = sum(shares[rank] for rank in kept)
        smallest = min(kept, key=lambda rank: (shares[rank], -rank))
        if shares[smallest] * num_bytes >= min_bytes * total:
            return kept
        kept.remove(smallest)
    return kept


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any),
    st.integers(1, 10_000),
    st.integers(0, 3_000),
    st.sampled_from([1, 2, 4]),
)
def test_shares_too_small_go_to_the_others(weights, num_elements, min_elements, element_bytes):
    """The same ranks are left as one by one, each within an element of its share of those."""
    shares = np.array(weights) / sum(weights)
    num_bytes, least = num_elements * element_bytes, min_elements * element_bytes
    aggregation = Aggregation(len(weights), num_bytes, element_bytes=element_bytes, min_bytes=least)
    kept = kept_one_by_one(weights, num_bytes, least)  # in whole numbers, without rounding
    exact = np.zeros(len(weights))
    exact[kept] = shares[kept] / shares[kept].sum() * num_bytes

    edges = byte_edges(aggregation, shares=shares)

    assert (edges[0], edges[-1]) == (0, num_bytes)
    assert (abs(np.diff(edges) - exact) < element_bytes + 1e-6).all()
    if least:
        assert np.flatnonzero(np.diff(edges)).tolist() == kept


def test_of_equal_shares_too_small_the_higher_ranks_go_first():
    """100 bytes among four, at least 30 each: three are left, the remainder with the lower."""
    aggregation = Aggregation(4, 100, element_bytes=2, min_bytes=30)

    edges = byte_edges(aggregation, shares=np.full(4, 0.25))

    assert edges.tolist() == [0, 34, 68, 100, 100]


def test_one_server_takes_all_that_is_less_than_the_minimum():
    """The smallest size is no reason to sum nothing."""
    aggregation = Aggregation(3, 8, min_bytes=1000)

    edges = byte_edges(aggregation, shares=np.array([0.3, 0.4, 0.3]))

    assert edges.tolist() == [0, 0, 8, 8]


def test_ranges_of_servers_alone():
    """Ranks that only work have empty ranges."""
    is_server = np.array([False, True, True])
    aggregation = Aggregation(3, 12, is_server=is_server)

    edges = byte_edges(aggregation, shares=np.array([0, 0.6, 0.4]))

    assert edges.tolist() == [0, 0, 8, 12]


def test_ten_billion_bytes_are_covered():
    """Integers all the way, past what a float of 32 bits counts."""
    aggregation = Aggregation(7, 4 * 2_500_000_001)
    shares = np.arange(1, 8) / 28

    edges = byte_edges(aggregation, shares=shares)

    assert edges[-1] == aggregation.num_bytes
    assert abs(np.diff(edges) - shares * aggregation.num_bytes).max() < 4 + 1e-3


def test_shares_that_are_none_are_refused():
    """As everywhere."""
    with pytest.raises(ValueError, match=r"`byte_edges\(shares=...\)` must be at least 0 and add"):
        byte_edges(Aggregation(2, 8), shares=np.array([0.5, 0.6]))
