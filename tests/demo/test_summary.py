"""The demo's figures follow from what was recorded."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from evenstep.demo._summary import summarise

from .recordings import OVERHEAD_S, PER_SAMPLE_S, recording

SPEEDS = (1.0, 0.5, 1 / 3, 1 / 6)
EQUAL, BEST = (24, 24, 24, 24), (48, 24, 16, 8)


@pytest.fixture
def summary():
    return summarise(
        recording([EQUAL], SPEEDS),
        recording([EQUAL, BEST], SPEEDS, loss=2.003),
        recording([(96,)], (1.0,), loss=2.001),
        speeds=SPEEDS,
    )


def test_the_limit_is_the_batch_over_the_summed_speeds(summary):
    """Plus what communication takes with nobody late."""
    assert summary.compute_limit_s == pytest.approx(96 * PER_SAMPLE_S / 2)
    assert summary.limit_s == pytest.approx(summary.compute_limit_s + 0.006)


def test_the_share_counts_everything_a_step_takes(summary):
    """Also what is neither computing nor communication."""
    assert summary.share_of_limit == pytest.approx((0.192 + 0.006) / (0.192 + OVERHEAD_S))


def test_the_speed_up_includes_the_steps_of_learning(summary):
    """One step at the equal split, nineteen balanced, against twenty equal ones."""
    equal_s = 24 * PER_SAMPLE_S * 6 + OVERHEAD_S
    balanced_s = 48 * PER_SAMPLE_S + OVERHEAD_S
    # The first step's time is unknown and counts as a usual one, in both runs.
    assert summary.speed_up == pytest.approx(20 * equal_s / (20 * balanced_s))


def test_half_of_the_workers_time_is_lost_to_equal_shares(summary):
    """Workers at 1, 1/2, 1/3 and 1/6 are busy 1/6, 1/3, 1/2 and all of an equal step."""
    assert summary.equal.idle_share == pytest.approx(0.5)
    assert summary.equal.idle_share_of_all == pytest.approx(0.5)
    assert summary.steps_to_balance == 1


def test_what_is_idle_at_the_end_is_what_was_shown_live(summary):
    """In a usual step nothing; the equal first step, where half was idle, counts in all steps."""
    balanced = recording([EQUAL, BEST], SPEEDS)
    first_s, usual_s = 24 * PER_SAMPLE_S * 6, 48 * PER_SAMPLE_S

    assert summary.balanced.idle_share == pytest.approx(balanced.idle_share(last=5)) == 0
    assert summary.balanced.idle_share_of_all == pytest.approx(
        0.5 * first_s / (first_s + 19 * usual_s)
    )


def test_loss_curves_are_compared_step_by_step(summary):
    """The largest difference counts, for all three comparisons."""
    assert summary.loss_difference == pytest.approx(0.003)
    assert summary.reference_difference == pytest.approx(0.001)
    assert summary.balanced_reference_difference == pytest.approx(0.002)


def test_speeds_are_measured_where_they_are_not_given():
    """On real devices the limit comes from what the workers reached themselves."""
    measured = summarise(recording([EQUAL], SPEEDS), recording([EQUAL, BEST], SPEEDS))

    assert measured.compute_limit_s == pytest.approx(96 * PER_SAMPLE_S / 2)
    assert measured.reference_difference is None


def test_a_machine_too_busy_to_emulate_is_told():
    """The share of late steps is that of the worse run."""
    equal, balanced = recording([EQUAL], SPEEDS), recording([EQUAL, BEST], SPEEDS)
    balanced.late_steps = 5
    told = summarise(equal, balanced, speeds=SPEEDS)

    assert told.late_share == pytest.approx(0.25)


def test_the_figures_are_plain_data(summary):
    """They go into a file for other programs."""
    assert json.loads(json.dumps(asdict(summary)))["num_steps"] == 20
