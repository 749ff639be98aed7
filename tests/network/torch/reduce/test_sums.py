"""Sums in rank order, and what 16 bits on the wire cost."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network._torch._pipeline import FLOATS, accumulator, mean_in_order, travels_in

from .memory import WIDE, gradients_of

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def mean_one_by_one(terms):
    """The same, an element at a time."""
    wide = WIDE[terms[0].dtype]
    means = []
    for values in zip(*(term.to(wide) for term in terms), strict=True):
        total = values[0]
        for value in values[1:]:
            total = total + value
        means.append((total / len(terms)).to(terms[0].dtype))
    return torch.stack(means)


@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from(FLOATS), st.booleans())
def test_the_mean_is_that_of_one_element_after_the_other(num_terms, num_elements, dtype, reuse):
    """To the bit, with memory of its own or a term's."""
    terms = [gradients_of(rank, num_elements, dtype) for rank in range(num_terms)]
    expected = mean_one_by_one(terms)
    same = WIDE[dtype] == dtype
    scratch = torch.empty(num_elements, dtype=accumulator(dtype))
    scratch = terms[min(1, num_terms - 1)] if same and reuse else scratch

    mean_in_order(terms, scratch=scratch, out=terms[-1])

    assert torch.equal(terms[-1], expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_part_of_the_mean_is_the_mean_of_the_parts(dtype):
    """However it is cut: vector instructions, their tails and threads change nothing."""
    size = 100_003
    terms = [gradients_of(rank, size, dtype) for rank in range(4)]
    whole, pieces = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
    scratch = torch.empty(size, dtype=accumulator(dtype))
    mean_in_order(terms, scratch=scratch, out=whole)
    edges = [0, 1, 6, 29, 1000, 33_333, 99_999, size]
    for begin, end in pairwise(edges):
        parts = [term[begin:end] for term in terms]
        mean_in_order(parts, scratch=scratch[begin:end], out=pieces[begin:end])

    assert torch.equal(whole, pieces)


@given(st.integers(2, 8), st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 99))
def test_a_wire_of_16_bits_keeps_its_bound(num_workers, wire, seed):
    """That of its docstring, element by element, tiny numbers among them."""
    exact = [gradients_of(100 * seed + rank, 300) for rank in range(num_workers)]
    terms = [gradients.to(wire) for gradients in exact]
    result = torch.empty(300, dtype=wire)
    mean_in_order(terms, scratch=torch.empty(300), out=result)
    wide = torch.stack(exact).double()
    unit = UNIT[wire]
    bound = (2 * unit + unit**2 + num_workers * 2.0**-23) * wide.abs().mean(dim=0)
    bound += 2.0**-24 if wire == torch.float16 else 0.0

    assert ((result.double() - wide.mean(dim=0)).abs() <= bound).all()


def test_what_travels_in_which_numbers():
    """16 bits only where they make less of something, and never of a kind that is no gradient."""
    half = torch.bfloat16

    assert [travels_in(dtype, None) for dtype in FLOATS] == list(FLOATS)
    assert travels_in(torch.float32, half) == travels_in(torch.float64, half) == half
    assert travels_in(torch.float16, half) == torch.float16
    with pytest.raises(TypeError, match=r"Gradients of torch.int32 cannot be summed by shares"):
        travels_in(torch.int32, half)
