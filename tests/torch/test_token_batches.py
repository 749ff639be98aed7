"""Batches that fill a budget of tokens: each sample once, none too large, another order each."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.torch import TokenBatches

LENGTHS = np.random.default_rng(0).integers(4, 90, 500)


def tokens_of(batch, *, padded):
    """Return what a batch takes up."""
    own = [int(LENGTHS[index]) for index in batch]
    return len(own) * max(own) if padded else sum(own)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=80),
    st.integers(0, 200),
    st.booleans(),
    st.booleans(),
)
def test_every_sample_is_in_one_batch_within_the_budget(lengths, more, padded, shuffle):
    budget = max(lengths) + more
    batches = TokenBatches(lengths, budget, padded=padded, shuffle=shuffle)
    found = list(batches)

    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    assert len(batches) == len(found)
    for batch in found:
        own = [lengths[index] for index in batch]
        assert (len(own) * max(own) if padded else sum(own)) <= budget


def test_samples_in_order_fill_a_batch_until_the_next_does_not_fit():
    assert list(TokenBatches([3, 4, 2, 5, 5], 9, shuffle=False)) == [[0, 1, 2], [3], [4]]
    assert list(TokenBatches([3, 4, 2, 5, 5], 10, shuffle=False)) == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize(("padded", "least"), [(False, 0.9), (True, 0.9)])
def test_little_of_the_budget_is_left_over(padded, least):
    """Padded, samples of a batch have similar lengths, and no length comes first."""
    found = list(TokenBatches(LENGTHS, 1000, padded=padded))
    used = [tokens_of(batch, padded=padded) / 1000 for batch in found]
    lengths = [float(LENGTHS[batch].mean()) for batch in found]
    half = len(found) // 2

    assert np.mean(used[:-1]) > least
    assert abs(np.mean(lengths[:half]) - np.mean(lengths[half:])) < 15
    if padded:
        assert (
            np.mean([tokens_of(b, padded=False) / tokens_of(b, padded=True) for b in found]) > 0.8
        )


def test_an_epoch_has_an_order_of_its_own_which_comes_again():
    batches = TokenBatches(LENGTHS, 1000, seed=3)
    first = list(batches)
    batches.set_epoch(1)
    second = list(batches)
    batches.set_epoch(0)

    assert first != second
    assert list(batches) == first == list(TokenBatches(LENGTHS, 1000, seed=3))
    assert list(TokenBatches(LENGTHS, 1000, seed=4)) != first
    assert batches.mean_size == round(500 / len(first))


@pytest.mark.parametrize(
    ("lengths", "budget", "words"),
    [
        ([], 10, "be integers of at least 1"),
        ([3, 0], 10, "be integers of at least 1"),
        ([3.5], 10, "float64 of shape"),
        ([[3, 4]], 10, "of shape"),
        ([3, 11], 10, "be at least the length of the longest sample, 11"),
        ([3], float("nan"), "the longest sample, 3"),
    ],
)
def test_what_cannot_be_filled_is_refused(lengths, budget, words):
    with pytest.raises(ValueError, match=words):
        TokenBatches(lengths, budget)
