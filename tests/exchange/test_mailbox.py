"""Integers by key: there when they are asked for, in whatever order ranks come to that."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._exchange._mailbox import Mailbox

from .channels import router
from .mailboxes import star


@pytest.fixture
def ends():
    made = star(3)
    yield made
    for end in made:
        end.channel.close()


@pytest.fixture(scope="module")
def pair():
    """Two ends for many examples, which leave nothing in them."""
    made = star(2)
    yield made
    for end in made:
        end.channel.close()


def ints(*numbers):
    return np.array(numbers, np.int64)


def test_integers_may_be_asked_for_before_or_after_they_are_posted(ends):
    """By a rank that is ahead of rank 0, and by one behind."""
    root, ahead, behind = ends
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ahead.box.share, (0, 1, 0), None)
        for block in range(3):
            root.box.share((0, 1, block), ints(block, 7))
        assert first.result(10).tolist() == [0, 7]
    for rank, blocks in ((behind, (2, 0, 1)), (ahead, (2, 1))):
        for block in blocks:
            assert rank.box.share((0, 1, block), None).tolist() == [block, 7]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 300), max_size=5))
def test_any_integers_arrive_as_they_are(pair, numbers):
    """Whatever their sizes, in however few bytes they travel."""
    (root, other), values = pair, ints(*numbers)
    root.box.post((0, 0, 0), values)

    arrived = other.box.take((0, 0, 0))
    assert arrived.dtype == np.int64
    assert arrived.tolist() == numbers


def test_what_a_round_left_behind_is_dropped_some_rounds_later(ends):
    """Of the same loader only; a loop may be left for another one, and gone on with."""
    root, other, _ = ends
    for key in ((0, 1, 0), (0, 2, 0), (1, 1, 0), (0, 10, 0)):
        root.box.post(key, ints(*key))
    other.box.take((0, 10, 0))

    assert list(other.box._here) == [(0, 2, 0), (1, 1, 0)]


def test_everybody_gets_everybodys_numbers_by_rank(ends):
    """Whoever comes first, and with a round more on its way."""
    waits = {}
    for rank in (2, 0, 1):
        for round_ in (1, 2):
            waits[rank, round_] = ends[rank].box.gather((0, round_, 0), [rank, round_])
    for round_ in (1, 2):
        for rank in range(3):
            assert waits[rank, round_]() == [[0, round_], [1, round_], [2, round_]]


def test_whoever_waits_learns_of_a_loss():
    """Rather than to wait for ever."""
    root, other = star(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.box.take, (0, 1, 0))
        root.channel.close()
        with pytest.raises(ConnectionError, match="rank 0"):
            waiting.result(10)
    other.channel.close()


def test_one_process_tells_nobody():
    """There is no channel."""
    alone = router()
    box = Mailbox(alone)
    alone.add(box)

    assert box.share((0, 1, 0), ints(3)).tolist() == [3]
    assert box.gather((0, 1, 0), [4])() == [[4]]
