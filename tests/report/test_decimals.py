"""Numbers that are read many at a time are those that a JSON parser reads."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._report._decimals import decimals

times = st.one_of(
    st.floats(0, 1e9, allow_nan=False),
    st.integers(0, 10**9).map(lambda us: us / 1e6),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**20), 10**20),
)


@given(st.lists(times, min_size=1))
def test_all_forms_of_a_number_are_read(values):
    """Plain ones, short ones, exponents, integers and signs, next to each other."""
    text = json.dumps(values)[1:-1].encode()

    assert decimals(text).tolist() == pytest.approx(values, rel=1e-15, abs=0)


@pytest.mark.parametrize("text", [b"", b"1.0, x", b"1.0,, 2.0", b"1.2.3", b"1.0, 2.0, ", b"\xff"])
def test_what_is_no_number_is_refused(text):
    """As a parser refuses it."""
    with pytest.raises(ValueError, match="could not convert"):
        decimals(text)


def test_what_is_not_finite_is_passed_on():
    """Whether a time can be is for the caller to say."""
    found = decimals(b"NaN, Infinity, 1.5")

    assert str(found.tolist()) == "[nan, inf, 1.5]"
