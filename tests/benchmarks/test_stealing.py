"""FlexRR's rule as published: what the comparator hands over, and when."""

import numpy as np

from benchmarks._stealing import Piece, Progress, Stealing
from evenstep.claims import Chunk


def progress(own, *, planned=None, queued=None, num_given=None, is_known=None):
    """Where ranks are: by default under way, with a hundred planned, nothing queued or given."""
    none = np.zeros(len(own), np.int64)
    planned = np.full(len(own), 100) if planned is None else np.array(planned)
    queued = none if queued is None else np.array(queued)
    num_given = none if num_given is None else np.array(num_given)
    known = np.ones(len(own), bool) if is_known is None else np.array(is_known)
    return Progress(planned, np.array(own), queued, num_given, known)


EQUAL = np.full(3, 10.0)


def test_less_than_a_fifth_behind_hands_over_nothing():
    """19 of 100 samples more before it than the one furthest ahead: jitter, not lag."""
    assert Stealing().next_piece(progress([80, 61, 70]), EQUAL, 0) is None
    assert Stealing().next_piece(progress([80, 60, 70]), EQUAL, 0) == Piece(1, 2)


def test_the_first_piece_is_small_and_the_next_twice_as_large():
    """2.5 % of the rest, then 5 %."""
    assert Stealing().next_piece(progress([80, 40, 40]), EQUAL, 0) == Piece(1, 2)
    after = progress([80, 40, 40], num_given=[1, 0, 0])
    assert Stealing().next_piece(after, EQUAL, 0) == Piece(1, 4)


def test_once_it_helps_it_goes_on_until_all_are_level():
    """Below a fifth too, as long as the taker ends the piece before the giver's own end."""
    near = progress([80, 72, 75], num_given=[3, 0, 0])
    assert Stealing().next_piece(near, EQUAL, 0) == Piece(1, 4)
    level = progress([80, 77, 77], num_given=[3, 0, 0])
    assert Stealing().next_piece(level, EQUAL, 0) is None


def test_a_hand_over_has_to_pay():
    """One that costs its taker more than the giver lags is not made."""
    behind = progress([80, 40, 40])  # by 4 s
    assert Stealing(hand_over_s=3.7).next_piece(behind, EQUAL, 0) == Piece(1, 2)
    assert Stealing(hand_over_s=3.9).next_piece(behind, EQUAL, 0) is None


def test_what_a_rank_was_given_counts():
    """The one furthest ahead is so with its gifts."""
    assert Stealing().next_piece(progress([80, 40, 45], queued=[0, 20, 0]), EQUAL, 0).taker == 2


def test_behind_is_counted_in_time():
    """With as much before it as the others, a rank at a third of their speed is behind."""
    slow = np.array([1.0, 3.0, 3.0])

    assert Stealing().next_piece(progress([90, 90, 90]), slow, 0) == Piece(1, 2)
    assert Stealing().next_piece(progress([90, 90, 90]), slow, 1) is None


def test_who_has_not_ended_a_part_neither_gives_nor_takes():
    """It may be paying the fixed cost of its step still, which its plan allows for."""
    first = progress([97, 40, 50], is_known=[False, True, True])
    assert Stealing().next_piece(first, EQUAL, 0) is None
    other = progress([80, 40, 50], is_known=[True, False, True])
    assert Stealing().next_piece(other, EQUAL, 0).taker == 2

    scheme, slow = Stealing(), np.array([1.0, 9.0])
    begun = scheme.turn(scheme.begin(np.array([80, 80])), 1, slow).state
    begun = scheme.turn(begun, 0, slow).state
    assert scheme.turn(begun, 0, slow).woken == ()
    assert scheme.turn(scheme.turn(begun, 1, slow).state, 0, slow).woken == (1,)


def test_pieces_come_from_the_end_and_wake_their_takers():
    """The giver goes on at its front; each faster rank gets one piece per look."""
    scheme, speeds = Stealing(hand_over_s=0.01), np.array([1.0, 9.0, 9.0])
    turn = scheme.turn(scheme.begin(np.array([100, 0, 0])), 0, speeds)
    assert (turn.chunk, turn.woken) == (Chunk(0, 3), ())
    turn = scheme.turn(turn.state, 0, speeds)
    assert (turn.chunk, turn.woken) == (Chunk(3, 6), (1, 2))

    gifts = [scheme.turn(turn.state, rank, speeds).chunk for rank in (1, 2)]
    assert gifts == [Chunk(*at, 0.01, is_moved=True) for at in ((98, 100), (94, 98))]


def test_looking_has_its_price():
    """A part costs its forward, but for the first."""
    scheme, state = Stealing(num_looks=2, look_s=0.5), None
    state = scheme.begin(np.array([10]))
    first = scheme.turn(state, 0, np.ones(1))
    assert first.chunk == Chunk(0, 5)
    assert scheme.turn(first.state, 0, np.ones(1)).chunk == Chunk(5, 10, 0.5)
