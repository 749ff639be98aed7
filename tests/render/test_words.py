"""Numbers as a person writes them, the same in tables, sentences and pictures."""

import pytest

from evenstep._render import clock, counted, number, percent, ratio, seconds, sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ratio(1 / 3), "1/3"),
        (ratio(2.0), "2"),
        (ratio(0.7071), "0.707"),
        (seconds(0.6153), "615 ms"),
        (seconds(0.0123), "12.3 ms"),
        (seconds(2.41), "2.41 s"),
        (seconds(-2.41), "-2.41 s"),
        (clock(64.6), "1:05"),
        (counted(1, "step"), "1 step"),
        (counted(1000, "step"), "1,000 steps"),
        (sizes((48, 24)), "48 + 24"),
    ],
)
def test_numbers_are_written_as_people_do(text, expected):
    """Short, with a unit."""
    assert text == expected


def test_figures_have_as_many_digits_as_they_need():
    """Shares as percent, and numbers, as the tables print them; never an exponent."""
    shares = [0.0004, 0.0996, 0.0999, 1.386, -0.00001, -0.1602]
    values = [0, 0.25, 43.44, 999.7, 3847.4]

    assert [percent(share) for share in shares] == ["0.0", "10", "10", "139", "0.0", "-16"]
    assert [number(value) for value in values] == ["0", "0.25", "43.4", "1000", "3847"]
