"""Claims in real training: each sample once, the same gradient, and less waiting."""

from functools import partial
from itertools import chain
from statistics import fmean

import pytest

from evenstep.testing import run_workers
from evenstep.torch import Runtime

from .._tiers import Groups, slow_but
from .claims import EPOCHS, MISTAKES, TAIL, ahead, by_auto, epochs, mistakes, two_models

pytestmark = pytest.mark.cluster

FIRST = ("restless", "one is slow")


@pytest.fixture(scope="module")
def found():
    """What each of three ranks says about an epoch."""

    def run(names):
        ranks = run_workers(3, epochs, names)
        return {name: [rank[name] for rank in ranks] for name in names}

    return Groups(FIRST, EPOCHS, run)


@pytest.mark.parametrize("epoch", slow_but(FIRST, EPOCHS))
def test_each_sample_is_trained_on_once(found, epoch):
    """Whoever computed it, in the short last step too."""
    seen = chain.from_iterable(each["seen"] for each in found[epoch])

    assert sorted(seen) == list(range(TAIL))


@pytest.mark.parametrize("epoch", slow_but(FIRST, EPOCHS))
def test_the_gradient_is_that_of_one_process(found, epoch):
    """In every step: 1e-12."""
    assert max(each["error"] for each in found[epoch]) <= 1e-12


@pytest.mark.parametrize("epoch", slow_but(FIRST, [e for e in EPOCHS if "one is slow" in e]))
def test_the_others_take_over_from_a_slow_rank(found, epoch):
    """Within the very step, under a plan that gives all the same: 16 samples.

    In one step of a busy machine, somebody else may be the slow one.
    """
    counts = [[n for n, _, _ in each["said"][1:-1]] for each in found[epoch]]

    assert fmean(counts[2]) <= 14
    assert min(map(sum, zip(*counts, strict=True))) == 48


@pytest.mark.slow
@pytest.mark.parametrize("epoch", ["count", "count, workers", "one is slow, count"])
def test_counts_keep_their_shape(found, epoch):
    """Forwards of four samples; what is left of a part may be fewer in the short last step."""
    for each in found[epoch]:
        assert {size for rows in each["rows"][:-1] for size in rows} == {4}


@pytest.mark.parametrize("epoch", slow_but(FIRST, EPOCHS))
def test_a_step_knows_what_it_had(found, epoch):
    """When it is over: samples, forwards, and the balancer's own count."""
    for each in found[epoch]:
        made = [(sum(rows), len(rows)) for rows in each["rows"]]
        for (samples, forwards, counted), (computed, ran) in zip(each["said"], made, strict=True):
            assert samples == counted
            assert forwards == ran
            assert computed == max(samples, 1)


@pytest.mark.slow
def test_a_loop_that_wants_it_whole_gets_the_plan(found):
    """`micro_batches` and `step.backward` know all before the first forward: nothing is claimed."""
    sizes = [each["said"] for each in found["all at once"]]

    assert all(sum(n for n, _, _ in step) == 48 for step in list(zip(*sizes, strict=True))[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("epoch", ["restless, workers", "one is slow, workers"])
def test_samples_are_fetched_ahead_and_others_on_demand(found, epoch):
    """What was used was asked for; what is asked for in vain is what changed hands."""
    requested, used = map(sum, zip(*(each["fetched"] for each in found[epoch]), strict=True))

    assert used == TAIL
    assert used <= requested <= 3 * TAIL


def test_auto_tries_claims_where_workers_wait():
    """One after the other is slow for a step, which no plan can foresee."""
    switched, num_steps = run_workers(2, by_auto)[0]

    assert switched[0].on
    assert num_steps >= 39  # the last one's reports may still be on their way at the close


def test_two_models_in_one_loop_wait_for_nobody_in_between():
    """Their first forwards and broadcasts are collective, and ranks have unlike numbers of them."""
    for errors in run_workers(2, two_models):
        assert set(errors) == {"as planned", "claimed"}
        assert max(errors.values()) <= 1e-12


@pytest.mark.parametrize(("depth", "whole"), [(1, True), (10, False)])
def test_a_loop_may_take_steps_before_it_uses_the_one_at_hand(depth, whole):
    """What it claims then is of the step that it uses, and counted there."""
    for amiss, error in run_workers(2, partial(ahead, depth=depth, whole=whole)):
        assert amiss == [0] * 16
        assert error <= 1e-12


@pytest.fixture(scope="module")
def texts():
    """What each mistake says."""
    return run_workers(2, mistakes)[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_claims_that_cannot_be_are_refused(texts, mistake):
    """With what stands against them, and the remedy."""
    assert "Runtime(claims=Hybrid(...))" in texts[mistake]
    assert MISTAKES[mistake][1] in texts[mistake]


def test_a_wish_that_is_none_is_named():
    """The message gives class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=r"`Runtime\(claims=...\)` must be .*, got 'on'"):
        Runtime(claims="on")
