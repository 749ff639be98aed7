"""Tables of seconds, and what makes one invalid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.timemodels import TableTime


@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(-1, 12))
def test_the_largest_batch_is_the_last_that_fits(seed, num_sizes, budget_s):
    """Counted along the rows, with plateaus and with a cap of its own for every worker."""
    random = np.random.default_rng(seed)
    table = np.cumsum(random.integers(0, 2, (3, num_sizes + 1)), axis=1) * 1.0
    table[:, 0] = 0
    most = random.integers(0, num_sizes + 1, 3)
    batch = TableTime(table).largest_batch(budget_s, most)

    expected = [
        max((b for b in range(cap + 1) if row[b] <= budget_s), default=0)
        for row, cap in zip(table, most, strict=True)
    ]
    assert batch.tolist() == expected


def test_seconds_are_read_from_the_table():
    """Each worker from its own row."""
    times = TableTime(np.array([[0.0, 1.0, 1.5], [0.0, 2.0, 2.0]]))

    assert times.world_size == 2
    assert times.seconds(np.array([2, 1])).tolist() == [1.5, 2.0]


def test_the_table_is_the_models_own():
    """Writing to what was given changes nothing, and the field is read-only."""
    table = np.zeros((1, 2))
    times = TableTime(table)
    table[0, 1] = 9

    assert times.seconds_table.tolist() == [[0, 0]]
    assert not times.seconds_table.flags.writeable


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([0.0, 1.0], r"have shape \(world_size, sizes\), .*, got \(2,\)"),
        ([[]], r"have shape"),
        ([[0.0, 1.0], [0.0, np.nan]], r"be finite on every rank, got .* on rank 1\."),
        ([[0.0, np.inf]], r"be finite .* cap it with `max_batch_size`"),
        ([[0.0, 1.0], [0.5, 1.0]], r"be 0 in the first column, got 0.5 on rank 1\."),
        ([[0.0, 1.0, 0.9]], r"never fall .*, got 1.0 s at 1 and 0.9 s at 2 on rank 0\. Smooth"),
        ([[0.0, -1.0]], r"never fall"),
    ],
)
def test_a_table_that_cannot_be_says_where(table, message):
    """The message gives class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=r"`TableTime\(seconds_table=...\)` must " + message):
        TableTime(np.array(table))
