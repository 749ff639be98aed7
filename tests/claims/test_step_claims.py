"""Whose samples a claim gets: each sample of the plan once, a rank's own before anybody else's."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from evenstep.claims import Factoring, Hybrid
from evenstep.claims._step_claims import Claim, StepClaims

PLANS = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any)
SCHEMES = st.builds(
    Hybrid, first=st.floats(0, 1), factoring=st.builds(Factoring, share=st.floats(0.1, 1))
)


def carried_out(claims, order):
    """Return who computed which samples, as (owner, index), when ranks come in ``order``."""
    first, done = claims.first, {}
    for rank, size in enumerate(first.tolist()):
        done[rank] = [(rank, index) for index in range(size)]
    coming = list(range(len(first)))
    while coming:
        rank = coming[next(order) % len(coming)]
        claimed = claims.claim(rank)
        if not claimed:
            coming.remove(rank)
        for claim in claimed:
            done[rank] += [(claim.owner, index) for index in range(claim.start, claim.stop)]
    return done


@given(PLANS, SCHEMES, st.integers(1, 8), st.data())
def test_each_sample_is_computed_once(plan, scheme, tile, data):
    """Whoever comes first, however often."""
    numbers = iter(lambda: data.draw(st.integers(0, 10)), None)

    done = carried_out(StepClaims(scheme, np.array(plan), tile=tile), numbers)

    samples = [sample for part in done.values() for sample in part]
    assert sorted(samples) == [(rank, i) for rank, size in enumerate(plan) for i in range(size)]


@given(PLANS, SCHEMES, st.integers(1, 8))
def test_claims_are_whole_tiles(plan, scheme, tile):
    """But for the last of a part: forwards of one shape stay so."""
    claims = StepClaims(scheme, np.array(plan), tile=tile)
    ends = set(plan)

    for rank in list(range(len(plan))) * 3:
        claimed = claims.claim(rank)
        for claim in claimed:
            assert claim.start % tile == 0
            assert claim.stop % tile == 0 or claim.stop in ends


def test_a_rank_takes_its_own_from_the_front_and_others_from_the_end():
    """What was fetched for it, and then what its owner would have come to last."""
    claims = StepClaims(Hybrid(first=0.5, factoring=Factoring(share=1.0)), np.array([8, 8, 8]))

    first = claims.claim(0)
    again = claims.claim(0)
    assert (first, again) == ((Claim(0, 4, 8),), (Claim(1, 6, 8),))
    third = claims.claim(0)
    assert third == (Claim(2, 6, 8),)

    own = claims.claim_own(1)
    assert own == (Claim(1, 4, 6),)
    assert claims.claim_own(1) == ()
    assert claims.claim(2) == (Claim(2, 4, 5),)


def test_claims_go_by_the_speeds_of_this_step():
    """Who has told none is taken for as fast as planned, beside those who have."""

    def size(*told):
        scheme = Hybrid(first=0.5, factoring=Factoring(share=1.0))
        claims = StepClaims(scheme, np.array([40, 40, 80]))
        for rank, speed in told:
            claim, *_ = claims.claim(rank, speed)
        return claim.num_samples

    assert size((0, 7.0)) == 20  # 80 are left, a quarter of them
    assert size((0, None)) == 20
    assert size((0, 7.0), (1, 7.0)) == 15
    assert size((0, 7.0), (1, 1.75)) == 60 * 1.75 // (7 + 1.75 + 80 * (7 / 40 + 1.75 / 40) / 2)


@given(PLANS, SCHEMES, st.integers(1, 8))
def test_a_loop_that_asks_for_all_of_its_own_gets_the_plan(plan, scheme, tile):
    """And leaves nothing for anybody."""
    claims = StepClaims(scheme, np.array(plan), tile=tile)
    sizes = claims.first.copy()
    for rank in range(len(plan)):
        claimed = claims.claim_own(rank)
        sizes[rank] += sum(claim.num_samples for claim in claimed)

    assert sizes.tolist() == plan
    assert all(claims.claim(rank) == () for rank in range(len(plan)))


@given(PLANS, SCHEMES, st.integers(1, 8), st.data())
def test_nothing_is_left_to_a_rank_that_has_asked_for_all_of_its_own(plan, scheme, tile, data):
    """Though it may be the fastest, to which the others leave what is left."""
    claims = StepClaims(scheme, np.array(plan), tile=tile)
    count = int(claims.first.sum())
    coming = [rank for rank, size in enumerate(plan) if size]
    while coming:
        rank = data.draw(st.sampled_from(coming))
        if data.draw(st.booleans()):
            claimed = claims.claim(rank, data.draw(st.none() | st.floats(0.01, 100)))
        else:
            claimed = claims.claim_own(rank)
            coming.remove(rank)
        if not claimed and rank in coming:
            coming.remove(rank)
        count += sum(claim.num_samples for claim in claimed)

    assert count == sum(plan)


def test_a_tile_of_nothing_is_named():
    """The message gives class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=r"StepClaims\(tile=...\)` must be at least 1"):
        StepClaims(Hybrid(), np.array([4]), tile=0)
