"""When rank 0 says what a loss divides by: late rather than wrong."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._exchange._loss_scales import LossScales, LossTrial
from evenstep._exchange._message_kinds import ScalesTold
from evenstep.events import LossUnclear

from .channels import router

EQUAL = np.array([32.0, 32.0])
SIZES = [EQUAL, *[np.array(sizes) for sizes in ((44.0, 20.0), (22.0, 42.0))] * 20]


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


@pytest.fixture
def news():
    return []


@pytest.fixture
def scales(news):
    """Rank 0's part in a run of two."""
    alone = router(0, 2)
    return LossScales(alone, refuse=news.append, emit=news.append)


def hear(scales, slopes, *, left_out=()):
    """Have both ranks tell of many steps, by one slope for each output."""
    for step in range(60):
        sizes = (44.0, 20.0) if step % 2 else (22.0, 42.0)
        for rank, size in enumerate(sizes):
            if (rank, step) not in left_out:
                told = [(0, output, size**slope, size, 0.01) for output, slope in enumerate(slopes)]
                scales.received(rank, ScalesTold(step, tuple(told)))


def test_what_is_as_it_was_said_is_no_news(scales, news):
    hear(scales, [0.0, 0.0])

    assert news == []


def test_another_loss_is_refused_once_with_its_remedy(scales, news):
    scales.open("sum", at_random=True)
    hear(scales, [0.0])

    (refused,) = news
    assert 'Leave `loss_reduction="sum"` out' in refused.text


def test_outputs_of_unlike_losses_are_told_apart(scales, news):
    hear(scales, [0.0, 1.0])

    assert "`balancer.weight(means) + sums`" in news[0].text
    assert "at another it did not" in news[0].text


def test_what_is_neither_is_said_and_training_goes_on(scales, news):
    hear(scales, [0.5])

    assert news == [LossUnclear(news[0].step)]


def test_steps_that_not_all_have_told_of_are_forgotten(scales, news):
    hear(scales, [1.0], left_out={(1, step) for step in range(0, 60, 5)})

    assert len(news) == 1
