"""How large the next claim is: facts special to `Factoring` and `Hybrid`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.claims import Chunk, Factoring, Hybrid

speeds = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9).map(np.array)
rules = st.builds(Factoring, st.floats(0.01, 1.0), st.integers(1, 20))


def test_a_claim_is_the_share_of_its_speed():
    """0.8 of 100 samples, of which a rank three times as fast as the other claims 3/4."""
    assert Factoring(0.8).next_claim(100, np.array([3.0, 1.0]), 0) == 60
    assert Factoring(0.8).next_claim(100, np.array([3.0, 1.0]), 1) == 20


@given(rules, speeds, st.integers(0, 10**6), st.data())
def test_a_claim_is_within_what_is_left(rule, speeds, remaining, data):
    """Never negative, never more than there is, at least the smallest unless it leaves the rest."""
    claim = rule.next_claim(remaining, speeds, data.draw(st.integers(0, len(speeds) - 1)))

    assert claim == 0 or min(rule.smallest, remaining) <= claim <= remaining


@given(rules, speeds, st.integers(1, 10**6))
def test_the_fastest_never_leaves_anything(rule, speeds, remaining):
    """So somebody is always there to end the step."""
    assert rule.next_claim(remaining, speeds, int(np.argmax(speeds))) >= 1


def test_who_would_end_last_claims_nothing():
    """A CPU that needs 8 ms for a sample leaves seven of them to a GPU that needs 1 ms each."""
    speeds = np.array([1000.0, 125.0])

    assert Factoring().next_claim(7, speeds, 1) == 0
    assert Factoring().next_claim(9, speeds, 1) == 1
    assert Factoring().next_claim(9, np.array([0.0, 125.0]), 1) > 1  # the GPU stays out


@pytest.mark.parametrize("world_size", [2, 8, 32])
def test_claims_are_few(world_size):
    """A logarithm of the samples, and about one for each rank at the end."""
    remaining, num_claims, equal = 4096, 0, np.ones(world_size)
    while remaining:
        remaining -= Factoring(0.8).next_claim(remaining, equal, num_claims % world_size)
        num_claims += 1

    estimate = world_size * (1 + np.log(4096 * 0.8 / world_size)) / 0.8
    assert num_claims == pytest.approx(estimate, rel=0.25)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Factoring(0.0), "share"),
        (lambda: Factoring(1.1), "share"),
        (lambda: Factoring(smallest=0), "smallest"),
        (lambda: Factoring(smallest=1.5), "smallest"),
        (lambda: Factoring().next_claim(5, np.zeros(2), 0), "speeds"),
        (lambda: Factoring().next_claim(5, np.array([1.0, -1.0]), 0), "speeds"),
        (lambda: Factoring().next_claim(5, np.array([1.0, np.nan]), 0), "speeds"),
    ],
)
def test_what_is_out_of_range_is_refused(make, match):
    """Each argument by its name."""
    with pytest.raises(ValueError, match=match):
        make()


FOUR = np.array([40, 20, 1, 0])


def test_a_part_of_the_plan_comes_unasked():
    """And at least one sample wherever something was planned, so that everybody is measured."""
    assert Hybrid().first_chunk(FOUR).tolist() == [16, 8, 1, 0]
    assert Hybrid(first=0.5).first_chunk(FOUR).tolist() == [20, 10, 1, 0]
    assert Hybrid(first=1.0).first_chunk(FOUR).tolist() == FOUR.tolist()
    assert Hybrid(first=0.0).first_chunk(FOUR).tolist() == [1, 1, 1, 0]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9), st.floats(0, 1))
def test_first_chunks_are_within_the_plan(plan, first):
    """Nobody begins with more than was planned, or with nothing where something was."""
    chunk = Hybrid(first=first).first_chunk(np.array(plan))

    assert (chunk <= plan).all()
    assert ((chunk > 0) == (np.array(plan) > 0)).all()


def test_the_rest_is_claimed_from_one_counter():
    """Claims are the next slots behind all first chunks, whoever comes, at a price."""
    scheme, equal = Hybrid(first=0.5, factoring=Factoring(0.8), claim_s=0.01), np.ones(4)
    turn = scheme.turn(scheme.begin(FOUR), 1, equal)
    assert turn.chunk == Chunk(20, 30)
    claims = []
    for rank in (3, 1, 3):
        turn = scheme.turn(turn.state, rank, equal)
        claims.append(turn.chunk)

    # 30 of 61 samples are left for claims of a fifth: 0.8 shared among four.
    assert claims == [Chunk(*at, 0.01, is_moved=True) for at in ((31, 37), (37, 41), (41, 45))]


def test_who_left_the_rest_to_others_stays_out():
    """It would need longer for one sample than the fastest for all, and counts no more."""
    scheme, speeds = Hybrid(first=0.0, factoring=Factoring(0.8)), np.array([100.0, 1.0])
    state = scheme.begin(np.array([1, 10]))
    for rank in (0, 1):
        state = scheme.turn(state, rank, speeds).state
    gone = scheme.turn(state, 1, speeds)
    assert gone.chunk is None
    assert scheme.turn(gone.state, 1, np.ones(2)).chunk is None

    # 0.8 of the 9 left, none of it kept for the other.
    assert scheme.turn(gone.state, 0, np.ones(2)).chunk.num_samples == 7


def test_no_claim_is_smaller_than_it_pays():
    """A tenth of what the rank would have of all 100, but never more than there is."""
    scheme, speeds = Hybrid(first=0.9, factoring=Factoring(0.5), least=0.1), np.array([3.0, 1.0])
    state = scheme.begin(np.array([75, 25]))
    for rank in (0, 1):
        state = scheme.turn(state, rank, speeds).state
    sizes = []
    for rank in (0, 0, 1, 0):
        turn = scheme.turn(state, rank, speeds)
        state = turn.state
        sizes.append(turn.chunk and turn.chunk.num_samples)

    assert sizes == [7, 4, None, None]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Hybrid(least=-0.1), "least"),
        (lambda: Hybrid(first=-0.1), "first"),
        (lambda: Hybrid(first=1.1), "first"),
        (lambda: Hybrid(claim_s=-1.0), "claim_s"),
        (lambda: Hybrid(claim_s=np.nan), "claim_s"),
    ],
)
def test_a_hybrid_out_of_range_is_refused(make, match):
    """Each argument by its name."""
    with pytest.raises(ValueError, match=match):
        make()
