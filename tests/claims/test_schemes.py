"""What every scheme promises, in whatever order ranks take their turns."""

import inspect

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from benchmarks._local_sgd import LocalSgd
from benchmarks._stealing import Stealing
from evenstep import claims
from evenstep.claims import AbstractScheme, Bsp, Factoring, Hybrid

SCHEMES = (
    Bsp(),
    LocalSgd(4),
    LocalSgd(3, by_speed=True),
    Hybrid(),
    Hybrid(first=0.0, claim_s=0.1),
    Hybrid(first=0.9, factoring=Factoring(0.5, 5)),
    Stealing(),
    Stealing(hand_over_s=0.1, look_s=0.01),
    Stealing(behind=0.01, first_piece=0.5, piece=1.0, num_looks=3),
)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=repr)

plans = st.lists(st.integers(0, 60), min_size=1, max_size=7).map(np.array)


def play(scheme, plan, draw_rank, draw_speeds):
    """Let ranks take turns until all have ended; return every rank's chunks."""
    state, chunks = scheme.begin(plan), [[] for _ in plan]
    active = set(range(len(plan)))
    while active:
        rank = draw_rank(sorted(active))
        turn = scheme.turn(state, rank, draw_speeds(len(plan)))
        state = turn.state
        active.update(turn.woken)
        if turn.chunk is None:
            active.discard(rank)
        else:
            chunks[rank].append(turn.chunk)
    return chunks


def by_luck(scheme, plan, rng, spread=2.0):
    """Play with ranks and speeds drawn at every turn."""
    return play(scheme, plan, rng.choice, lambda size: np.exp(spread * rng.standard_normal(size)))


@every_scheme
@given(plans, st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 4.0]))
def test_every_slot_is_computed_once(scheme, plan, seed, spread):
    """Nothing is lost and nothing is done twice, however ranks and speeds come and go."""
    chunks = by_luck(scheme, plan, np.random.default_rng(seed), spread)

    slots = [slot for own in chunks for each in own for slot in range(each.start, each.stop)]
    assert sorted(slots) == list(range(plan.sum()))
    assert all(each.num_samples >= 1 for own in chunks for each in own)


@every_scheme
def test_the_same_turns_give_the_same_chunks(scheme):
    """A machine without memory of its own: states are values."""
    plan = np.array([30, 5, 0, 50])
    one, other = (by_luck(scheme, plan, np.random.default_rng(7)) for _ in range(2))

    assert one == other


@every_scheme
def test_a_turn_leaves_its_state_as_it_was(scheme):
    """So a driver may ask what would be, and ask again."""
    plan = np.array([40, 40, 40])
    state, speeds = scheme.begin(plan), np.array([1.0, 1.0, 9.0])
    for rank in (0, 2, 0, 2, 1):
        again = [scheme.turn(state, rank, speeds) for _ in range(2)]
        assert again[0].chunk == again[1].chunk
        state = again[0].state
    assert plan.tolist() == [40, 40, 40]
    assert speeds.tolist() == [1.0, 1.0, 9.0]


@every_scheme
@given(plans, st.integers(0, 10**6))
def test_who_does_not_move_samples_says_so(scheme, plan, seed):
    """Without moves, a rank's only chunk is its plan; what moved is marked."""
    chunks = by_luck(scheme, plan, np.random.default_rng(seed))
    if not scheme.moves_samples:
        assert [[each.num_samples for each in own] for own in chunks] == [
            [size] if size else [] for size in plan.tolist()
        ]
    edges = np.concatenate([[0], np.cumsum(plan)])
    for rank, own in enumerate(chunks):
        kept = [each for each in own if not each.is_moved]
        assert sum(each.num_samples for each in kept) <= plan[rank]
        if isinstance(scheme, Stealing):
            assert all(edges[rank] <= each.start < each.stop <= edges[rank + 1] for each in kept)


@every_scheme
@pytest.mark.parametrize("plan", [[-1, 3], [1.5, 2.0], [[1, 2]]])
def test_a_plan_that_is_none_is_refused(scheme, plan):
    """Whole samples, at least 0, one entry per rank."""
    with pytest.raises(ValueError, match="batch_size"):
        scheme.begin(np.array(plan))


def test_every_scheme_is_tested_here():
    """A new leaf joins the list above, where the comparators of the benchmarks stand too."""
    public = (getattr(claims, name) for name in claims.__all__)
    leaves = {each for each in public if inspect.isclass(each) and issubclass(each, AbstractScheme)}

    assert leaves - {AbstractScheme} <= {type(scheme) for scheme in SCHEMES}
