"""Who owns which sample, replayed by every rank from the plans, and from lengths all have seen."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._planner import UNKNOWN, Plan, SampleCosts
from evenstep.torch import Cost
from evenstep.torch._data.deal._by_cost import SeenLengths, merged
from evenstep.torch._data.deal._plans import PlanBook, StepSpan

from .stream_fakes import Meeting

COST = Cost(from_batch="length")


def test_a_plan_that_was_left_out_is_noticed():
    """Ranks which skip a plan would disagree on who owns what."""
    book = PlanBook(0, 8)
    book.apply(Plan(3, 0, (4, 4)), 0)

    with pytest.raises(RuntimeError, match="plan 5 came after plan 3"):
        book.on_plan(Plan(5, 1, (2, 6)))


def test_a_new_plan_moves_only_what_it_must():
    """A rank whose size stays keeps its very samples; the others keep all that they can."""
    books = [PlanBook(rank, 12) for rank in range(3)]
    for book in books:
        book.apply(Plan(0, 0, (4, 4, 4)), 0)
        book.apply(Plan(1, 1, (1, 4, 7)), 1)
    slots = [book.share(StepSpan(1, 0, 12)).slots.tolist() for book in books]

    assert slots[1] == [4, 5, 6, 7]
    assert set(slots[0]) < {0, 1, 2, 3}
    assert set(slots[2]) > {8, 9, 10, 11}


def test_a_plan_point_tells_whether_shares_may_have_changed():
    """Not if it says what was known: nothing ahead has to be looked at again."""
    book = PlanBook(0, 8)
    first, heard, other = Plan(0, 0, (4, 4)), Plan(1, 1, (2, 6)), Plan(2, 2, (7, 1))

    assert book.apply(first, 0)
    assert not book.apply(first, 1)
    book.on_plan(heard)
    assert not book.apply(heard, 1)
    assert book.apply(other, 2)


def test_a_plan_for_later_leaves_the_steps_before_it_alone():
    """With a device that runs ahead, the newest plan is often for the step after next."""
    book = PlanBook(0, 8)
    book.apply(Plan(0, 0, (4, 4)), 0)
    book.on_plan(Plan(1, 3, (6, 2)))
    book.apply(Plan(0, 0, (4, 4)), 2)
    sizes = [len(book.share(StepSpan(step, 0, 8)).slots) for step in (2, 3, 4)]

    assert sizes == [4, 6, 6]


@pytest.mark.parametrize("begun", [True, False])
def test_a_loader_that_waits_forgets_what_it_can_no_longer_need(begun):
    """While others train, plans come and go; it shares its next step as those that saw all."""
    book, whole = PlanBook(0, 8), PlanBook(0, 8)
    if begun:
        book.apply(Plan(0, 0, (4, 4)), 0)
        whole.apply(Plan(0, 0, (4, 4)), 0)
    for k in range(1, 200):
        plan = Plan(k, k, (2 + k % 5, 6 - k % 5))
        book.on_plan(plan, now=k - 1)
        whole.on_plan(plan)

    assert len(book._entries) + len(book._early) <= 3
    for each in (book, whole):
        each.apply(Plan(198, 198, (5, 3)), 198)
    shares = [each.share(StepSpan(199, 0, 8)) for each in (book, whole)]
    assert shares[0].equals(shares[1])


def test_plans_heard_before_the_first_plan_point_count():
    """Ranks hear them at different times, and all the same share it the same way."""
    early, late = PlanBook(0, 8), PlanBook(0, 8)
    plans = [Plan(k, k, size) for k, size in enumerate([(4, 4), (2, 6), (7, 1)])]
    for plan in plans:
        early.on_plan(plan)
    early.apply(plans[0], 0)
    late.apply(plans[0], 0)
    for plan in plans:
        late.on_plan(plan)

    for step in range(3):
        shares = [book.share(StepSpan(step, 0, 8)) for book in (early, late)]
        assert shares[0].equals(shares[1])
        assert len(shares[0].slots) == plans[step].batch_size[0]


@given(st.lists(st.lists(st.integers(0, 1 << 62), max_size=5), min_size=1, max_size=4))
def test_ranks_that_have_seen_unlike_numbers_of_samples_are_merged(told):
    """What fills up shorter rows counts for nothing."""
    longest = max(map(len, told))
    rows = [[*row, *[UNKNOWN] * (longest - len(row))] for row in told]

    assert merged(rows, list(map(len, told))).tolist() == [one for row in told for one in row]


@given(
    st.lists(  # epochs, of ranks, of samples
        st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1 << 33))), min_size=3),
        max_size=3,
    )
)
def test_all_ranks_have_one_table_after_each_epoch(epochs):
    """That of all samples that any of them has seen, whichever comes twice; also as it is saved."""
    world_size = 3
    meeting, seen, tables = Meeting(world_size), [], []
    for rank in range(world_size):
        tables.append(SampleCosts(COST, np.full(10, UNKNOWN, np.int32)))
        seen.append(SeenLengths(tables[rank], meeting.side(rank)))
    every = {}
    for epoch in epochs:
        for rank, samples in enumerate(epoch[:world_size]):
            for index, length in samples:
                seen[rank].record(np.array([index]), np.array([length]))
                every.setdefault(index, set()).add(min(length, (1 << 30) - 1))
        threads = [Thread(target=one.merge) for one in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        again = SampleCosts(COST, np.full(10, UNKNOWN, np.int32))
        restored = SeenLengths(again, meeting.side(0))
        restored.restore(restored.check(seen[0].written()))
        for table in (*tables[1:], again):
            assert np.array_equal(table.lengths, tables[0].lengths)
    known = np.flatnonzero(tables[0].lengths != UNKNOWN)
    assert set(known) == set(every)
    assert all(int(tables[0].lengths[index]) in every[index] for index in known)


@pytest.mark.parametrize("text", ["!", "eJw=", None, 7], ids=["garbage", "cut off", "none", "int"])
def test_damaged_lengths_are_refused(text):
    """With the remedy."""
    seen = SeenLengths(SampleCosts(COST, np.full(4, UNKNOWN, np.int32)), Meeting(1).side(0))
    with pytest.raises(ValueError, match=r"have lengths of 4 samples.*Leave out"):
        seen.check(text)
