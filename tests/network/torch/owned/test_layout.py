"""Who owns which elements."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import Split
from evenstep.network.torch._owned._ownership import UNIT, Ownership, common

SHAPES = st.lists(st.tuples(st.integers(0, 900), st.booleans()), min_size=1, max_size=8)
SHARES = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)


def made(sizes, shares, min_bytes=0):
    parameters = [
        torch.empty(size, dtype=torch.float64 if wide else torch.float32) for size, wide in sizes
    ]
    split = Split.of(np.array(shares) / sum(shares), min_bytes=min_bytes)
    return Ownership.of(parameters, split), parameters


@given(SHAPES, SHARES, st.sampled_from([0, 2000]))
def test_every_element_has_one_owner(sizes, shares, min_bytes):
    """Spans follow each other, in whole units, and nobody without a share owns any."""
    layout, parameters = made(sizes, shares, min_bytes)
    for index, parameter in enumerate(parameters):
        spans = [layout.span(rank, index) for rank in range(len(shares))]
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == parameter.numel()
        owners = [rank for rank in range(len(shares)) if layout.owns(rank, index)]
        assert owners[0] == layout.first_owner(index)
        assert all(shares[rank] for rank in owners)
        for rank, span in enumerate(spans):
            assert span.start % UNIT == 0 or span.start == parameter.numel()
            assert span.stop == span.start or rank in owners
        if not parameter.numel():
            assert len(owners) == 1


@given(SHAPES, SHARES)
def test_each_type_is_cut_by_the_shares(sizes, shares):
    """Within one unit of all units of the type, unless a rank gets less than one."""
    layout, parameters = made(sizes, shares)
    for dtype in (torch.float32, torch.float64):
        those = [i for i, parameter in enumerate(parameters) if parameter.dtype == dtype]
        units = sum(max(1, -(-parameters[i].numel() // UNIT)) for i in those)
        for rank, share in enumerate(shares):
            owned = sum(layout.units[i][rank + 1] - layout.units[i][rank] for i in those)
            if all(units * each >= sum(shares) for each in shares if each):
                assert abs(owned - units * share / sum(shares)) <= 1


@given(*[st.integers(0, 30)] * 4)
def test_what_spans_have_in_common(a, b, c, d):
    """As of sets."""
    one, other = slice(min(a, b), max(a, b)), slice(min(c, d), max(c, d))
    both = set(range(one.start, one.stop)) & set(range(other.start, other.stop))
    span = common(one, other)

    assert set(range(span.start, span.stop)) == both
