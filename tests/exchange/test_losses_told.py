"""What rank 0 makes of losses: which are not finite, and which are not as they were said."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._exchange._loss_checks import LossScales, LossTrial, NotFinite
from evenstep._exchange._message_kinds import NotFiniteReport, ScalesReport
from evenstep.events import LossNotFinite

from .channels import router

EQUAL = np.array([32.0, 32.0])
SIZES = [EQUAL, *[np.array(sizes) for sizes in ((44.0, 20.0), (22.0, 42.0))] * 20]


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
        books.received(rank, NotFiniteReport(step, half))


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


def verdicts(slope, *, noise, seed, believed=1.0, skew=0.0, sizes=SIZES, at_random=True):
    """What a trial says of each step, whose scales follow a slope."""
    draw = np.random.default_rng(seed)
    trial = LossTrial(2, at_random=at_random)
    found = []
    for size in sizes:
        variance = noise**2 * size.mean() / size
        spread = draw.normal(0.0, np.sqrt(variance))
        common = draw.normal(0.0, 1.0)  # as training goes on, and by the loss scale
        own = np.array([skew, -skew])
        scale = np.exp(common + own + slope * np.log(size) + spread)
        found.append(trial.add(scale, size, variance * believed))
    return found


@given(seed=st.integers(0, 10**6), noise=st.floats(0.0, 0.05))
def test_little_noise_is_decided_within_ten_steps(seed, noise):
    for slope, found in ((0.0, "mean"), (1.0, "sum")):
        assert verdicts(slope, noise=noise, seed=seed)[10] == found


@given(seed=st.integers(0, 10**6), noise=st.floats(0.1, 1.0), at_random=st.booleans())
def test_much_noise_is_never_decided_wrong(seed, noise, at_random):
    for slope, other in ((0.0, "sum"), (1.0, "mean")):
        assert other not in verdicts(slope, noise=noise, seed=seed, at_random=at_random)


@given(seed=st.integers(0, 10**6), skew=st.floats(-1.5, 1.5), noise=st.floats(0.01, 0.3))
def test_ranks_that_differ_at_equal_sizes_are_compared_with_themselves(seed, skew, noise):
    """In an order of the user's own, rank 0 may have all that is hard."""
    for slope, other in ((0.0, "sum"), (1.0, "mean")):
        settings = {"noise": noise, "seed": seed, "skew": skew, "at_random": False}
        assert other not in verdicts(slope, **settings)


def test_sizes_that_never_change_leave_an_order_of_the_users_own_undecided():
    """A rank with fewer samples may as well have the easy ones."""
    sizes = [np.array([44.0, 20.0])] * 200

    assert set(verdicts(1.0, noise=0.02, seed=0, sizes=sizes, at_random=False)) == {None}
    assert verdicts(1.0, noise=0.02, seed=0, sizes=sizes)[-1] == "sum"


def test_a_mixed_term_is_neither():
    found = verdicts(0.5, noise=0.05, seed=0)

    assert found[-1] == "between"
    assert set(found) <= {None, "between"}


@pytest.mark.parametrize("sizes", [[EQUAL] * 200, [np.array([32.0, 32.2])] * 200])
def test_sizes_that_hardly_differ_are_not_judged(sizes):
    """The wrong weight is right there."""
    assert set(verdicts(1.0, noise=0.01, seed=0, sizes=sizes)) == {None}


def test_one_step_is_never_enough():
    assert set(verdicts(1.0, noise=0.0, seed=0)[:3]) == {None}


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan, -1.0])
def test_what_is_no_scale_is_left_out(bad):
    trial = LossTrial(3, at_random=True)
    for size in ([44.0, 20.0, 32.0], [20.0, 44.0, 32.0]) * 20:
        found = trial.add(np.array([size[0], size[1], bad]), np.array(size), np.ones(3) / 100)

    assert found == "sum"


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_scale_without_a_known_variance_is_left_out(bad):
    """Of both ranks, even: nothing is decided, and nothing fails."""
    trial = LossTrial(2, at_random=True)

    assert trial.add(np.array([44.0, 20.0]), np.array([44.0, 20.0]), np.full(2, bad)) is None


@pytest.fixture
def news():
    return []


@pytest.fixture
def scales(news):
    """Rank 0's part in a run of two."""
    alone = router(0, 2)
    return LossScales(alone, refuse=news.append, warn=news.append)


def compare(scales, slopes, *, left_out=(), first=0):
    """Have both ranks tell of many steps, by one slope for each output."""
    for step in range(first, first + 60):
        sizes = (44.0, 20.0) if step % 2 else (22.0, 42.0)
        for rank, size in enumerate(sizes):
            if (rank, step) not in left_out:
                told = [(0, output, size**slope, size, 0.01) for output, slope in enumerate(slopes)]
                scales.received(rank, ScalesReport(step, tuple(told)))


def test_what_is_as_it_was_said_is_no_news(scales, news):
    compare(scales, [0.0, 0.0])

    assert news == []


def test_another_loss_is_refused_once_with_its_remedy(scales, news):
    scales.open("sum", at_random=True)
    compare(scales, [0.0])

    (refused,) = news
    assert 'Leave `loss_reduction="sum"` out' in refused.text


def test_outputs_of_unlike_losses_are_told_apart(scales, news):
    compare(scales, [0.0, 1.0])

    assert "`balancer.weight(means) + sums`" in news[0].text
    assert "and not at another" in news[0].text


def test_what_is_neither_is_said_and_training_goes_on(scales, news):
    compare(scales, [0.5])

    (warning,) = news
    assert "neither a mean nor a sum" in warning


def test_steps_that_not_all_have_told_of_are_forgotten(scales, news):
    compare(scales, [1.0], left_out={(1, step) for step in range(0, 60, 5)})

    assert len(news) == 1


def test_a_loss_that_becomes_another_one_is_refused_then(scales, news):
    """As one whose second term grows, from nothing."""
    compare(scales, [0.0])
    compare(scales, [1.0], first=60)

    assert len(news) >= 1
    assert 'loss_reduction="sum"' in news[0].text
