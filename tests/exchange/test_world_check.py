"""What ranks state about themselves, compared: one text for all that differs."""

from __future__ import annotations

from functools import partial

import pytest

from evenstep._exchange._world_check import (
    code_of,
    described,
    difference,
    differing,
    first_unlike,
    refusal,
)
from evenstep._planner import Bounds
from evenstep.policies import Auto


def test_what_is_the_same_on_all_ranks_is_no_difference():
    """Nor is what one rank does not state."""
    assert difference([{"": {"a": "1"}}] * 3, {}) is None
    assert difference([{"": {"a": "1"}}, {"": {}}, {}], {}) is None


def test_each_difference_is_named_with_its_values_its_ranks_and_its_remedy():
    """In one text; of several loaders, which one."""
    stated = [{"": {"`A(b=...)`": "1"}, "loader 2": {"c": str(rank % 2)}} for rank in range(3)]
    stated[2][""]["`A(b=...)`"] = "2"

    assert differing(stated) == [("", "`A(b=...)`"), ("loader 2", "c")]
    assert difference(stated, {"c": "Mend it."}) == (
        "`A(b=...)` must be the same on all ranks, got 1 on ranks 0, 1 and 2 on rank 2. Set it "
        "alike.\n"
        "c (loader 2) must be the same on all ranks, got 0 on ranks 0, 2 and 1 on rank 1. Mend it."
    )


def test_many_ranks_and_many_values_stay_one_sentence():
    """Runs of ranks are drawn together, and long values and long lists cut."""
    text = refusal("x", ["a", *"bbbb", "a", "a", "a", "b", None], "Do.")
    assert (
        text == "x must be the same on all ranks, got a on ranks 0, 5 to 7 and b on ranks 1 to "
        "4, 8. Do."
    )
    text = refusal("x", [str(rank) * 1000 for rank in range(9)], "Do.")
    assert "and 6 other values on the other ranks" in text
    assert len(text) < 700


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "1", "b": "2"}, {"a": "1", "b": "3"}),
        ({"a": "1", "b": "2"}, {"a": "1"}),
        ({"a": "1"}, {"a": "1", "b": "2"}),
    ],
)
def test_the_first_entry_that_differs_is_found(one, other):
    """Also where a rank lacks it."""
    name, values = first_unlike([one, other])

    assert name == "b"
    assert values == [one.get("b", "none"), other.get("b", "none")]


def test_entries_in_another_order_are_told():
    """The entries themselves are all alike then."""
    name, values = first_unlike([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}])

    assert (name, values) == ("the order", ["a, b", "b, a"])


class Nameless:
    """An object whose text has its address in it."""


class Broken:
    """An object that has no text."""

    def __repr__(self):
        raise RuntimeError("no")


def test_a_text_of_a_setting_is_the_same_in_every_process():
    """No address, no order of a set; settings of frozen values are told."""
    assert described(Bounds(max=(5, 6))).startswith("Bounds(min='auto', max=(5, 6), ")
    assert described(Auto()) == described(Auto())
    assert described({"b", "a"}) == "{'a', 'b'}"
    assert " at 0x" not in described([Nameless(), len, lambda: 0, partial(len), object])
    assert described(Nameless()).endswith("test_world_check.Nameless")
    assert described(Broken()).endswith("test_world_check.Broken")
    assert described(partial(described)).startswith("partial(")


def test_functions_are_told_apart_by_their_code_in_one_version_of_python():
    """Also by that of functions inside of them; what has no code tells nothing."""
    assert code_of(lambda x: x + 1) == code_of(lambda x: x + 1)
    assert code_of(lambda x: x + 1) != code_of(lambda x: x + 2)
    assert code_of(lambda x: x.a) != code_of(lambda x: x.b)
    assert code_of(lambda x: [y + 1 for y in x]) != code_of(lambda x: [y + 2 for y in x])
    assert code_of("tokens") == code_of(len) == {}
