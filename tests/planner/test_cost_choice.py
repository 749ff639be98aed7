"""What plans go by changes where it is sure to pay, and does not go back and forth."""

from dataclasses import replace

import numpy as np
import pytest

from evenstep._planner import CostChoice
from evenstep.timemodels import CostEstimator

WORK = np.tile([10.0, 1000.0], (4, 1))


def estimated(slower=1.0, noise=0.05, error=0.05, error_by_count=0.1):
    """What is known after 40 steps of a second, in which the last rank is slower."""
    estimator = CostEstimator.fresh(num_features=2, kinds=[0] * 4)
    for step in range(40):
        seconds = np.array([1, 1, 1, slower]) * (1 + noise * (-1) ** step)
        estimator = estimator.observe(WORK, np.full(4, 10), seconds)
    return replace(estimator, error=error, error_by_count=error_by_count)


ALIKE = estimated(noise=0).model


def after(now, *, by_speed=True, **known):
    """The choice that follows."""
    return now.next(estimated(**known), [WORK], by_speed=by_speed, always_by_cost=False)


@pytest.mark.parametrize(
    ("slower", "left", "kept"),
    [(1.01, False, False), (1.08, False, True), (1.4, True, True)],
)
def test_speeds_of_their_own_are_given_up_later_than_taken(slower, left, kept):
    """Where the saving is between half of what noise pretends and all of it, all stays."""
    assert after(CostChoice(ALIKE), slower=slower).is_apart is left
    assert after(CostChoice(ALIKE, is_apart=True), slower=slower).is_apart is kept


def test_more_noise_asks_for_more():
    """The same saving counts for nothing where steps vary by a third."""
    assert not after(CostChoice(ALIKE), slower=1.4, noise=0.3).is_apart


def test_alike_ranks_share_one_line():
    """The mean of all, also where speeds are not asked for."""
    model = after(CostChoice(ALIKE), slower=1.4, noise=0, by_speed=False).model

    assert model.seconds(WORK) == pytest.approx(np.full(4, 1.1))


def test_less_than_a_millisecond_is_not_worth_it():
    """However sure it is, as in ``auto``."""
    short = CostEstimator.fresh(num_features=2, kinds=[0] * 4)
    for _ in range(40):
        short = short.observe(WORK, np.full(4, 10), [1e-3, 1e-3, 1e-3, 2e-3])

    choice = CostChoice(ALIKE).next(short, [WORK], by_speed=True, always_by_cost=False)

    assert not choice.is_apart


@pytest.mark.parametrize(
    ("error", "left", "kept"), [(0.099, True, False), (0.101, False, False), (0.09, True, True)]
)
def test_counts_are_left_again_for_features_that_are_better_by_some(error, left, kept):
    """By cost until features are no better; by cost again once they are by 5 %."""
    assert after(CostChoice(ALIKE), error=error).by_cost is left
    assert after(CostChoice(ALIKE, by_cost=False), error=error).by_cost is kept


@pytest.mark.parametrize(("num_steps", "is_fixed"), [(7, False), (8, True)])
def test_at_first_ranks_differ_by_a_factor_alone(num_steps, is_fixed):
    """Whatever of a step seems fixed: the mean of all, longer on the slow rank."""
    known = estimated(slower=2.0, noise=0.01)
    seems = replace(
        known.model,
        intercept_s=np.array([0, 0, 0, 2.0]),
        slope_s=known.model.slope_s * np.array([[1], [1], [1], [0]]),
    )
    known = replace(known, model=seems, num_steps=num_steps)

    choice = CostChoice(ALIKE).next(known, [WORK / 2], by_speed=True, always_by_cost=False)

    assert choice.is_apart
    assert (choice.model.slope_s[3] == 0).all() == is_fixed
    assert choice.model.seconds(WORK / 2) == pytest.approx([0.5, 0.5, 0.5, 2.0], rel=0.02)


def test_a_rank_without_work_in_a_step_has_a_speed_all_the_same():
    """Others took its share over, so that it has no seconds of its own in it."""
    known = replace(estimated(slower=2.0, noise=0.01), num_steps=4)
    known = replace(known, model=replace(known.model, intercept_s=np.zeros(4)))
    taken_over = WORK.copy()
    taken_over[0] += taken_over[3]
    taken_over[3] = 0

    choice = CostChoice(ALIKE).next(known, [taken_over], by_speed=True, always_by_cost=False)

    assert choice.model.seconds(WORK)[3] == pytest.approx(2.0, rel=0.02)
