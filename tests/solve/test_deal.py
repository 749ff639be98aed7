"""Slots change owner as rarely as can be, and the same way on every rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.solve._deal import Deal


def held(deal):
    return np.bincount(deal.owner, minlength=deal.world_size)


def random_plans(seed, world_size, num_samples, num_plans):
    """Return batch sizes that add up, zero shares among them."""
    random = np.random.default_rng(seed)
    shares = random.dirichlet(np.full(world_size, 0.7), num_plans)
    return [random.multinomial(num_samples, share) for share in shares]


plans = st.builds(
    random_plans, st.integers(0, 2**32), st.integers(1, 12), st.integers(0, 90), st.integers(1, 12)
)


def test_a_fresh_deal_is_contiguous():
    """Rank 0's slots come first; a rank may hold none."""
    deal = Deal.fresh(np.array([2, 0, 3]))

    assert deal.owner.tolist() == [0, 0, 2, 2, 2]
    assert deal.slots(2).tolist() == [2, 3, 4]
    assert deal.slots(1).tolist() == []


@given(plans)
def test_every_move_is_the_smallest_there_is(plans):
    """Each rank holds what the plan says; half of the summed changes change owner."""
    deal = Deal.fresh(plans[0])
    for plan in plans[1:]:
        moved = deal.move(plan)

        assert held(moved).tolist() == plan.tolist()
        assert (moved.owner != deal.owner).sum() == abs(plan - held(deal)).sum() // 2
        deal = moved


@given(plans)
def test_a_plan_taken_back_restores_every_owner(plans):
    """From wherever the deal stands, there and back again changes nothing."""
    deal = Deal.fresh(plans[0])
    for plan in plans[1:]:
        there = deal.move(plan)

        assert there.move(held(deal)).owner.tolist() == deal.owner.tolist()
        deal = there


@given(st.lists(st.integers(-20, 20), max_size=30))
def test_two_ranks_touch_no_more_slots_than_their_farthest_plan(swings):
    """However a boundary swings, only the slots between its extremes ever change owner."""
    deal, touched = Deal.fresh(np.array([40, 40])), np.zeros(80, bool)
    for swing in swings:
        moved = deal.move(np.array([40 + swing, 40 - swing]))
        touched |= moved.owner != deal.owner
        deal = moved

    assert touched.sum() == max([0, *swings]) - min([0, *swings])


def test_jittering_plans_touch_few_slots():
    """A hundred plans of eight ranks, each within 4 of 64: a tenth of all slots, not all."""
    random, deal = np.random.default_rng(0), Deal.fresh(np.full(8, 64))
    touched = np.zeros(512, bool)
    for _ in range(100):
        change = random.integers(-2, 3, 8)
        moved = deal.move(64 + change - np.roll(change, 1))
        touched |= moved.owner != deal.owner
        deal = moved

    assert touched.mean() < 0.1


def test_what_was_gained_last_is_given_back_first():
    """Its own slots last, and those from their end."""
    start = Deal.fresh(np.array([3, 3, 3]))
    more = start.move(np.array([2, 5, 2]))
    less = more.move(np.array([2, 2, 5]))

    assert more.slots(1).tolist() == [2, 3, 4, 5, 8]
    assert less.slots(1).tolist() == [3, 4]
    assert less.slots(2).tolist() == [2, 5, 6, 7, 8]


def test_what_was_held_before_is_taken_first():
    """Slots 0 and 4 are free; rank 2 held the higher one once."""
    deal = Deal.fresh(np.array([1, 2, 2])).move(np.array([1, 3, 1]))
    deal = deal.move(np.array([0, 2, 3]))

    assert deal.slots(2).tolist() == [0, 3, 4]
    assert Deal.fresh(np.array([1, 3, 1])).move(np.array([1, 1, 3])).slots(2).tolist() == [2, 3, 4]


def test_of_two_slots_held_before_the_one_lost_last_comes_back():
    """Rank 0 lost slot 3, then slot 2, and may have one of them."""
    deal = Deal.fresh(np.array([4, 1, 1, 0]))
    for plan in ([3, 2, 1, 0], [2, 2, 2, 0], [3, 1, 1, 1]):
        deal = deal.move(np.array(plan))

    assert deal.slots(0).tolist() == [0, 1, 2]
    assert deal.slots(3).tolist() == [3]


@given(plans)
def test_ranks_that_replay_the_plans_hold_the_same_deal(plans):
    """Whatever integers they come as."""
    mine, yours = Deal.fresh(plans[0]), Deal.fresh(plans[0].astype(np.int32).tolist())
    for plan in plans[1:]:
        mine, yours = mine.move(plan), yours.move(plan.astype(np.int32))

    assert mine.owner.tolist() == yours.owner.tolist()


def test_a_deal_is_a_value():
    """It is read-only, a move leaves it alone, and a plan that changes nothing returns it."""
    deal = Deal.fresh(np.array([4, 4]))
    deal.move(np.array([1, 7]))

    assert deal.owner.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert not deal.owner.flags.writeable
    assert deal.move(np.array([4, 4])) is deal


@pytest.mark.parametrize("bad", [[-1, 3], [1.0, 1.0], [[1, 1]], 2])
def test_sizes_that_count_nothing_are_refused(bad):
    """Whole samples, one entry per rank."""
    with pytest.raises(ValueError, match=r"`Deal\.fresh\(batch_size=...\)` must be integers"):
        Deal.fresh(np.array(bad))


@pytest.mark.parametrize(
    ("bad", "message"),
    [([5, 4], "add up to 8, got 9"), ([4, 4, 0], "have 2 entries, got 3"), ([9, -1], "at least 0")],
)
def test_a_move_keeps_ranks_and_samples(bad, message):
    """The message names the method, the rule and the value, and says how to start anew."""
    with pytest.raises(ValueError, match=r"`Deal\.move\(batch_size=...\)` must .*" + message):
        Deal.fresh(np.array([4, 4])).move(np.array(bad))
