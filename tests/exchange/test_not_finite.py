"""When rank 0 says that losses are not finite: once, with the step and the ranks it began with."""

import pytest

from evenstep._exchange._message_kinds import NotFiniteTold
from evenstep._exchange._not_finite import NotFinite
from evenstep.events import LossNotFinite

from .channels import router


@pytest.fixture
def said():
    """What rank 0 emitted."""
    return []


@pytest.fixture
def books(said):
    alone = router()
    made = NotFinite(alone, emit=said.append)
    alone.add(made)
    return made


def hear(books, rank, *steps, half=False):
    """Have rank 0 hear of a rank's steps."""
    for step in steps:
        books.received(rank, NotFiniteTold(step, half))


def test_five_steps_in_a_row_are_said_with_the_first_and_its_ranks(books, said):
    """One rank's NaN is in all losses from the next step on: who was first is what helps."""
    hear(books, 1, 3)
    hear(books, 2, 3)
    for step in (4, 5, 6):
        for rank in (1, 2):
            hear(books, rank, step)
        books.tell(step, is_half=False)
    assert said == []

    hear(books, 1, 7)

    assert said == [LossNotFinite(3, (1, 2))]


def test_it_is_said_once(books, said):
    """A dead run does not repeat it, at its end neither."""
    hear(books, 1, *range(40), *range(50, 90))
    books.end(89)

    assert said == [LossNotFinite(0, (1,))]


def test_a_finite_step_in_between_begins_anew(books, said):
    """Steps that a script skips by hand, now and then, are its own affair."""
    hear(books, 1, 0, 1, 2, 3, 5, 6, 7, 8, 10, 11)
    books.end(12)

    assert said == []


def test_in_half_precision_a_loss_scale_may_halve_until_it_is_one(books, said):
    """GradScaler begins with 2**16, and skips a step for each halving."""
    hear(books, 1, *range(16), half=True)
    books.end(15)
    assert said == []

    hear(books, 1, 16, half=True)

    assert said == [LossNotFinite(0, (1,))]


def test_a_run_that_ends_so_is_told_of_it(books, said):
    """A script that raises on its first NaN has fewer than five."""
    hear(books, 1, 3)
    books.tell(4, is_half=False)
    books.end(4)

    assert said == [LossNotFinite(3, (1,))]


@pytest.mark.parametrize("bad", [(), (0, 1)])
def test_a_run_that_ends_well_says_nothing(bad, books, said):
    """Whatever was before."""
    hear(books, 1, *bad)
    books.end(9)

    assert said == []


def test_a_device_that_is_read_late_is_still_the_first(books, said):
    """Ranks tell of their steps when their devices have got there."""
    for step in (4, 5, 6):
        books.tell(step, is_half=False)
    hear(books, 1, 3, 4, 5, 6, 7)

    assert said == [LossNotFinite(3, (1,))]
