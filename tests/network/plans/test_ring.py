"""Rings, worked out by hand."""

import pytest

from evenstep.network import Aggregation, Links
from evenstep.network._plans._duration import ring_s

from .reference import from_pairs, mesh, simple


def test_a_slow_pair_in_rank_order_sets_the_time():
    """Six ranks, one way 40 times slower than the others."""
    aggregation = Aggregation(6, 1200)

    assert ring_s(aggregation, from_pairs(mesh(6, 40))) == pytest.approx(0.05)
    assert ring_s(aggregation, from_pairs(mesh(6, 40, (0, 1, 1)))) == pytest.approx(2.0)
    assert ring_s(aggregation, from_pairs(mesh(6, 40, (0, 2, 1)))) == pytest.approx(0.05)


def test_half_duplex_takes_both_directions_in_turn():
    """And latency counts twice per worker that the ring has more than one."""
    case = simple([10] * 4, half=True)
    links = Links(case.links.up_bytes_per_s, latency_s=0.01, half_duplex=True)

    assert ring_s(case.aggregation, case.links) == pytest.approx(0.3)
    assert ring_s(case.aggregation, links) == pytest.approx(0.3 + 0.06)


def test_ranks_that_only_serve_are_no_part_of_it():
    """However slow they are."""
    case = simple([10] * 4 + [1], helpers=1)

    assert ring_s(case.aggregation, case.links) == pytest.approx(0.15)
