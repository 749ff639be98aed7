"""Fair sharing is what its definition says, and the closed forms are its lower bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import Aggregation, Links, exchange_s
from evenstep.network._plans._duration import fair_rates, fair_transfers

from .reference import fewer


def drawn(seed, size):
    """Links of unlike ranks, some pairs slow, and who sends to whom."""
    random = np.random.default_rng(seed)
    pair = np.where(random.random((size, size)) < 0.2, random.uniform(1, 20, (size, size)), np.inf)
    links = Links(
        random.uniform(20, 155, size), random.uniform(20, 155, size), pair_bytes_per_s=pair
    )
    active = random.random((size, size)) < 0.8
    np.fill_diagonal(active, False)
    return links, active


@fewer
@given(seed=st.integers(0, 2**31), size=st.integers(2, 9))
def test_each_transfer_is_limited_where_none_is_faster(seed, size):
    """By its pair, or by a full end on which it is among the fastest: so nobody could have more."""
    links, active = drawn(seed, size)
    rates = fair_rates(active, links)
    up, down = rates.sum(axis=1), rates.sum(axis=0)

    assert (up <= links.up_bytes_per_s * (1 + 1e-6)).all()
    assert (down <= links.down_bytes_per_s * (1 + 1e-6)).all()
    assert not rates[~active].any()
    for sender, receiver in np.argwhere(active):
        rate = rates[sender, receiver] * (1 + 1e-6)
        full_up = up[sender] >= links.up_bytes_per_s[sender] * (1 - 1e-6)
        full_down = down[receiver] >= links.down_bytes_per_s[receiver] * (1 - 1e-6)
        assert (
            rate >= links.pair_bytes_per_s[sender, receiver]
            or (full_up and rate >= rates[sender].max())
            or (full_down and rate >= rates[:, receiver].max())
        )


def test_a_known_network():
    """Four ranks that all send to all: the slowest is shared first, then what it left."""
    links = Links(np.array([200.0, 150, 100, 50]))
    rates = fair_rates(~np.eye(4, dtype=np.bool_), links)

    slow, third = 50 / 3, (100 - 50 / 3) / 2
    assert rates[0] == pytest.approx([0, 150 - slow - third, third, slow])


def test_what_ends_first_leaves_its_part_to_the_others():
    """1 and 3 bytes over a link of 2: the first takes 1 s, the other 2 s in all."""
    num_bytes = np.zeros((3, 3))
    num_bytes[1, 0], num_bytes[2, 0] = 1, 3
    taken = fair_transfers(num_bytes, Links(np.array([2.0, 9, 9])))

    assert taken.seconds[[1, 2], 0] == pytest.approx([1, 2], rel=0.02)
    assert taken.down_bytes_per_s[0] == pytest.approx(2)
    assert taken.up_bytes_per_s.tolist() == pytest.approx([0, 1, 2])


@fewer
@given(seed=st.integers(0, 2**31), size=st.integers(2, 8))
def test_an_exchange_takes_no_less_than_its_closed_form_and_little_more(seed, size):
    """Links that are not full to the last moment cost some per cent."""
    random = np.random.default_rng(seed)
    links = Links(random.uniform(20, 155, size))
    shares = random.dirichlet(np.full(size, 2.0))
    push = np.outer(np.ones(size), shares)
    formula_s = exchange_s(Aggregation(size, 4, num_chunks=None), links, shares=shares) / 4
    taken_s = fair_transfers(push + push.T, links).seconds.max()

    assert formula_s * (1 - 1e-6) <= taken_s <= 1.35 * formula_s


def test_bytes_that_cannot_be_are_refused():
    """With the shape that was wanted."""
    for wrong in (np.zeros((2, 2)), np.full((3, 3), -1.0), np.full((3, 3), np.nan)):
        with pytest.raises(ValueError, match=r"fair_transfers\(num_bytes=...\)"):
            fair_transfers(wrong, Links(np.ones(3)))
