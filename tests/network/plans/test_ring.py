"""Rings, against all orders tried one by one."""

import itertools

import numpy as np
import pytest
from hypothesis import given

from evenstep.network import Aggregation, Links, best_ring, ring_s

from .reference import cases, mesh, simple


@given(cases())
def test_no_order_is_better_than_the_best(case):
    """Up to six workers, whatever pairs and directions; it is the same as any without pairs."""
    workers = np.flatnonzero(case.aggregation.is_worker).tolist()
    best = best_ring(case.aggregation, case.links)
    seconds = ring_s(case.aggregation, case.links, order=best.tolist())
    tried = [
        ring_s(case.aggregation, case.links, order=[workers[0], *others])
        for others in itertools.permutations(workers[1:])
    ]

    assert sorted(best.tolist()) == workers
    assert best[0] == workers[0]
    assert seconds == pytest.approx(min(tried), rel=1e-12)
    if case.links.pair_bytes_per_s is None:
        assert min(tried) == pytest.approx(max(tried), rel=1e-12)


def test_a_well_ordered_ring_avoids_a_slow_pair():
    """Six ranks, one way in rank order 40 times slower than the others."""
    aggregation, links = Aggregation(6, 1200), Links.from_pairs(mesh(6, 40, (0, 1, 1)))

    best = best_ring(aggregation, links).tolist()

    assert ring_s(aggregation, links) == pytest.approx(2.0)
    assert ring_s(aggregation, links, order=best) == pytest.approx(0.05)


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


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [0.0, 1.0, 2.0]])
def test_an_order_of_others_is_refused(order):
    """All workers, once each."""
    with pytest.raises(ValueError, match=r"`ring_s\(order=...\)` must be the workers \[0, 1, 2\]"):
        ring_s(Aggregation(3, 4), Links(np.ones(3)), order=order)


def test_too_many_workers_to_search_are_refused():
    """With what to do instead."""
    with pytest.raises(ValueError, match=r"at most 12 workers, got 13\. Order the ring by racks"):
        best_ring(Aggregation(13, 4), Links(np.ones(13)))
