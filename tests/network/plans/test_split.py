"""Ranges by integers alone, against the rule carried out in fractions."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import Split, traffic_bytes
from evenstep.network._plans._share_plan import PARTS, cut

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
        (lambda: cut(3, [0, 0]), r"`cut\(parts\)` must be integers >= 0, one at least positive"),
        (lambda: cut(-1, [1]), r"`cut\(num_elements, min_elements=...\)` must be integers >= 0"),
    ],
)
def test_what_is_no_split_is_refused(make, text):
    """By name, with what to give instead."""
    with pytest.raises(ValueError, match=text):
        make()
