"""A loss that is not finite on one rank is said once, with that rank and the step."""

import pytest

from evenstep.events import LossNotFinite
from evenstep.testing import run_workers

from . import not_finite_runs as runs

pytestmark = pytest.mark.cluster

FIRST = "From step 3 on losses are NaN or infinite, first on rank 1: "


@pytest.mark.parametrize("model", ["plain", "judge", "by hand"])
def test_a_nan_on_one_rank_is_said_with_the_rank_and_the_step(model):
    """Its gradient comes from the loss, or the loss is the model's own, or weighted by hand."""
    (heard, logged), (nothing, quiet) = run_workers(2, runs.with_nan, (1,), model)

    assert heard == [LossNotFinite(3, (1,))]
    assert len([text for text in logged if text.startswith(FIRST)]) == 1
    assert (nothing, quiet) == ([], [])


def test_every_rank_that_was_first_is_named():
    """And none that only followed, by the parameters that are NaN by then."""
    (heard, _), *_ = run_workers(3, runs.with_nan, (1, 2))

    assert heard == [LossNotFinite(3, (1, 2))]


def test_a_run_that_ends_after_two_such_steps_says_so():
    """As a script does that raises when it logs a NaN."""
    (heard, logged), _ = run_workers(2, runs.with_nan, (1,), "plain", 5)

    assert heard == [LossNotFinite(3, (1,))]
    assert logged[0].startswith(FIRST)


def test_it_is_seen_in_any_micro_batch_of_any_model():
    """Not in the last one alone, whose gradient is finite."""
    (heard, _), _ = run_workers(2, runs.with_accumulation)

    assert heard == [LossNotFinite(3, (1,))]


@pytest.mark.parametrize(("scale", "half"), [(2.0**18, True), (2.0**27, True), (2.0**127, False)])
def test_a_loss_scale_that_halves_is_no_news(scale, half):
    """Three steps that overflow, or a dozen in half precision: GradScaler skips and recovers."""
    (heard, logged), _ = run_workers(2, runs.with_scaler, scale, half)

    assert (heard, logged) == ([], [])


def test_a_stand_in_does_not_count():
    """Its weight is 0, and 0 is what the others get of its NaN."""
    (heard, logged), _ = run_workers(2, runs.with_stand_in)

    assert (heard, logged) == ([], [])
