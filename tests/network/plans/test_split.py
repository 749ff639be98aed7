"""Ranges by integers alone, what falls back to all-reduce, and what an aggregation refuses."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import (
    Aggregation,
    Links,
    Split,
    exchange_s,
    optimal_shares,
    plan_shares,
    traffic_bytes,
)
from evenstep.network._plans._duration import ring_s
from evenstep.network._plans._share_plan import PARTS, cut

from .reference import cases, simple

shares = st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any)


def of(weights, **settings):
    return Split.of(np.array(weights) / sum(weights), **settings)


def cut_by_fractions(num_elements, parts, min_elements):
    """The sizes, each rank looked at by itself."""
    kept = [rank for rank, part in enumerate(parts) if part]
    while len(kept) > 1:
        total = sum(parts[rank] for rank in kept)
        smallest = min(kept, key=lambda rank: (parts[rank], -rank))
        if Fraction(num_elements * parts[smallest], total) >= min_elements:
            break
        kept.remove(smallest)
    total = sum(parts[rank] for rank in kept)
    exact = {rank: Fraction(num_elements * parts[rank], total) for rank in kept}
    sizes = [int(exact.get(rank, 0)) for rank in range(len(parts))]
    while sum(sizes) < num_elements:
        rank = max(kept, key=lambda rank: (exact[rank] - sizes[rank], -rank))
        sizes[rank] += 1
    return sizes


@given(shares, st.integers(0, 5000), st.integers(0, 600))
def test_ranges_are_those_of_largest_remainder(parts, num_elements, min_elements):
    """They follow each other, cover everything once, and none is below the minimum."""
    edges = cut(num_elements, parts, min_elements=min_elements)
    sizes = [int(size) for size in np.diff(edges)]

    assert (edges[0], edges[-1]) == (0, num_elements)
    assert sizes == cut_by_fractions(num_elements, parts, min_elements)
    assert all(size >= min_elements for size in sizes if size) or max(sizes) == num_elements
    assert all(not size for size, part in zip(sizes, parts, strict=True) if not part)


def test_fewer_elements_than_ranks_or_than_the_minimum():
    """Some ranks get none; below the minimum, the one with most parts, the lowest, gets all."""
    assert cut(2, [1, 1, 1], min_elements=0) == (0, 1, 2, 2)
    assert cut(2, [1, 1, 1]) == (0, 1, 2, 2)
    assert cut(9, [1, 3, 3], min_elements=10) == (0, 0, 9, 9)


def test_no_float_rounds_what_is_large():
    """Past what 53 bits count, to the element."""
    num_elements = (1 << 61) + 1

    assert cut(num_elements, [1, 1]) == (0, (1 << 60) + 1, num_elements)


@given(shares)
def test_parts_add_up_and_nothing_stays_nothing(weights):
    """Within one part of the shares."""
    split = of(weights)

    assert sum(split.parts) == PARTS
    for part, weight in zip(split.parts, weights, strict=True):
        assert bool(part) <= bool(weight)
        assert abs(part - PARTS * weight / sum(weights)) < 1


@given(
    shares,
    st.integers(0, 3000),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 4000),
    st.integers(0, 900),
)
def test_chunks_cover_a_bucket_in_order(weights, num_elements, element_bytes, chunk, least):
    """As few as may be, none larger than asked for, each cut by the parts."""
    split = of(weights, chunk_bytes=chunk, min_bytes=least)
    most = max(1, chunk // element_bytes)
    chunks = split.chunks(num_elements, element_bytes)

    assert len(chunks) == -(-num_elements // most)
    assert [edges[0] for edges in chunks[1:]] == [edges[-1] for edges in chunks[:-1]]
    assert sum(edges[-1] - edges[0] for edges in chunks) == num_elements
    for edges in chunks:
        size = edges[-1] - edges[0]
        assert size <= most
        minimum = max(1, -(-least // element_bytes))
        assert np.diff(edges).tolist() == cut_by_fractions(size, split.parts, minimum)


@given(shares, st.integers(0, 3000))
def test_every_byte_that_is_sent_is_received(weights, num_elements):
    """And each is pushed and pulled once by every worker that does not sum it itself."""
    split = of(weights, chunk_bytes=500, min_bytes=8)
    workers = range(max(1, len(weights) - 1))  # the last rank has no gradients
    sent, received = traffic_bytes(split, num_elements, 4, workers=workers)
    own = sum(
        edges[rank + 1] - edges[rank] for edges in split.chunks(num_elements, 4) for rank in workers
    )

    assert sum(sent) == sum(received) == 2 * 4 * (len(workers) * num_elements - own)


def test_a_slow_rank_without_a_share_carries_the_gradients_once():
    """V each way instead of the 1.5 V of a ring of four; the others 5/3 V."""
    sent, received = traffic_bytes(of([1, 1, 1, 0]), 3 << 18, 4, workers=range(4))
    volume = 3 << 20

    assert sent == received
    assert [round(number / volume, 3) for number in sent] == [1.667, 1.667, 1.667, 1.0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Split((1, 2)), r"`Split\(parts=...\)` must add up to 1048576, got \(1, 2\), wh"),
        (lambda: Split((0.5, 0.5)), r"`Split\(parts=...\)` must be a tuple of integers >= 0"),
        (lambda: Split((PARTS + 1, -1)), r"`Split\(parts=...\)` must be a tuple of integers >= 0"),
        (lambda: Split((PARTS,), epoch=-1), r"`Split\(epoch=...\)` must be an integer >= 0, got"),
        (lambda: Split((PARTS,), chunk_bytes=0), r"`Split\(chunk_bytes=...\)` must be an integer"),
        (lambda: Split.of(np.array([0.5, 0.6])), r"`Split.of\(shares\)` must add up to 1, got"),
        (lambda: Split.of(np.array([1.5, -0.5])), r"`Split.of\(shares\)` must be at least 0"),
    ],
)
def test_what_is_no_split_is_refused(make, text):
    """By name, with what to give instead."""
    with pytest.raises(ValueError, match=text):
        make()


def planned(case, **settings):
    """The plan of the optimal shares."""
    shares = optimal_shares(case.aggregation, case.links)
    return plan_shares(case.aggregation, case.links, shares=shares, **settings)


@given(cases(), st.sampled_from([0.0, 0.15, 1.0]))
def test_a_plan_is_never_predicted_to_lose(case, margin):
    """It is carried out only where a ring takes longer by the margin, and predicts its integers."""
    plan = planned(case, margin=margin)

    assert plan.falls_back == (not plan.ring_s > plan.exchange_s * (1 + margin))
    assert plan.reason.startswith("plain all-reduce: " if plan.falls_back else "shares: ")
    assert plan.ring_s == ring_s(case.aggregation, case.links)
    assert plan.exchange_s == exchange_s(case.aggregation, case.links, shares=plan.shares)


def test_a_plan_that_gains_says_how_much():
    """One slow rank among four, in eight chunks."""
    case = simple([10, 10, 10, 1], chunks=8)

    plan = planned(case)

    assert not plan.falls_back
    assert plan.parts == (349526, 349525, 349525, 0)
    assert plan.reason == "shares: 1.12 s against 1.5 s of a ring, 1.33 times as fast"
    assert plan.gain == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("bandwidths", "chunks", "reason"),
    [
        ([10] * 4, None, "plain all-reduce: no shares gain 15% here, these take 0.15 s against"),
        ([10, 10, 10, 1], 1, "plain all-reduce: no shares gain 15% here, these take 1.5 s against"),
        ([10, 10, 8, 8], None, "plain all-reduce: no shares gain 15% here, these take 0.167 s"),
        ([10, 10, 10, 5], 2, "plain all-reduce: these shares take 0.3 s against 0.3 s of a ring"),
    ],
)
def test_a_plan_that_does_not_gain_falls_back_and_says_so(bandwidths, chunks, reason):
    """On equal links, behind a barrier, where the margin is missed and where chunks are few."""
    plan = planned(simple(bandwidths, chunks=chunks))

    assert plan.falls_back
    assert plan.reason.startswith(reason)


def test_a_single_worker_has_nothing_to_sum():
    """With a server of its own or without."""
    for helpers in (0, 1):
        case = simple([10] * (1 + helpers), helpers=helpers)
        plan = planned(case)

        assert plan.falls_back
        assert plan.gain == 1
        assert plan.reason == "plain all-reduce: a single worker has nothing to sum"


@pytest.mark.parametrize("margin", [-0.1, np.nan, np.inf])
def test_a_margin_out_of_range_is_refused(margin):
    """With what it means."""
    with pytest.raises(ValueError, match=r"`plan_shares\(margin=...\)` must be finite .* is 15 %"):
        planned(simple([1, 1]), margin=margin)


TRUE, FALSE = np.array([True, True]), np.array([False, False])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world_size": 0}, r"`Aggregation\(world_size=...\)` must be an integer >= 1, got 0"),
        ({"world_size": 2.0}, "must be an integer >= 1, got 2.0. Count all ranks"),
        ({"num_bytes": 0}, r"`Aggregation\(num_bytes=...\)` must be an integer >= 1"),
        ({"num_chunks": 0}, r"`Aggregation\(num_chunks=...\)` must .* None the limit of many"),
        ({"num_chunks": True}, r"`Aggregation\(num_chunks=...\)` must be an integer >= 1"),
        ({"is_worker": TRUE[:1]}, r"`Aggregation\(is_worker=...\)` must be 2 booleans"),
        ({"is_server": np.array([1, 0])}, r"`Aggregation\(is_server=...\)` must be 2 booleans"),
        ({"is_server": FALSE}, "must be 2 booleans, one at least true"),
        (
            {"is_worker": np.array([True, False]), "is_server": np.array([True, False])},
            "must give every rank something to do, got nothing for rank 1. Leave such a rank out",
        ),
    ],
)
def test_an_aggregation_that_cannot_be_is_refused(given, message):
    """By argument, rule, value and remedy."""
    arguments = {"world_size": 2, "num_bytes": 8} | given
    with pytest.raises(ValueError, match=message):
        Aggregation(**arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"up_bytes_per_s": np.ones((2, 1))}, r"`Links\(up_bytes_per_s=...\)` must have shape"),
        ({"up_bytes_per_s": np.ones(0)}, r"must have shape \(world_size,\), got \(0,\)"),
        ({"up_bytes_per_s": np.array([1, 0])}, "positive and finite on .* got 0.0 on rank 1"),
        ({"up_bytes_per_s": np.array([np.nan, 1])}, "got nan on rank 0. Measure it, or leave"),
        ({"down_bytes_per_s": np.ones(3)}, r"`Links\(down_bytes_per_s=...\)` must have shape \(2,"),
        ({"down_bytes_per_s": np.array([1, np.inf])}, "positive and finite on every rank, got inf"),
        ({"pair_bytes_per_s": np.ones(2)}, r"must have shape \(2, 2\), got \(2,\)"),
        ({"pair_bytes_per_s": np.eye(2)}, "between any two ranks, got 0.0 from rank 0 to 1"),
        ({"latency_s": -1.0}, r"`Links\(latency_s=...\)` must be finite and at least 0"),
        ({"latency_s": np.nan}, r"`Links\(latency_s=...\)` must be finite and at least 0"),
    ],
)
def test_links_that_cannot_be_are_refused(given, message):
    """By argument, rule, value and remedy."""
    arguments = {"up_bytes_per_s": np.ones(2)} | given
    with pytest.raises(ValueError, match=message):
        Links(**arguments)


def test_what_was_given_may_change_later():
    """Arrays are copied, and the copies cannot be written to."""
    up, works = np.array([1.0, 2.0]), TRUE.copy()
    links, aggregation = Links(up), Aggregation(2, 8, is_worker=works)
    up[0] = 9
    works[0] = False

    assert links.up_bytes_per_s.tolist() == [1, 2]
    assert aggregation.num_workers == 2
    with pytest.raises(ValueError, match="read-only"):
        links.up_bytes_per_s[0] = 3


def test_half_duplex_shares_a_link_between_both_ways():
    """The harmonic sum: half of it where both are as fast."""
    links = Links(np.array([10.0, 6.0]), np.array([10.0, 3.0]), half_duplex=True)

    assert links.bandwidth_bytes_per_s == pytest.approx([5, 2])
