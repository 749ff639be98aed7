"""What the network learns, when it decides, and that it gives way."""

from dataclasses import replace

import numpy as np
import pytest

from evenstep import Resources
from evenstep.prediction import Ema, LocalLevel, Narx
from evenstep.prediction._narx import fresh_weights, gradient_of, outputs_of

from .._tiers import slow_but
from .simulated import FIRST, foresee, rmse, series

EXPLAINED = ("neighbours", "restless load", "short of memory")
UNEXPLAINED = ("steady", "odd steps", "wandering", "lasting changes")


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
@pytest.mark.parametrize("kind", EXPLAINED)
def test_resources_that_explain_the_speed_are_learnt(kind, seed):
    """After 200 steps at most 0.7 times the average's error, by its own networks in 80 %."""
    given = series(kind, seed)

    _, own = foresee(Narx(), given)

    assert rmse(Narx(), given) <= 0.7 * rmse(Ema(), given)
    assert own[FIRST:].mean() >= 0.8


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
@pytest.mark.parametrize("kind", UNEXPLAINED)
def test_where_nothing_explains_the_speed_it_is_the_average(kind, seed):
    """Within 5 % of the average's error, whatever the resources say."""
    given = series(kind, seed)

    assert rmse(Narx(), given) <= 1.05 * rmse(Ema(), given)


def test_a_load_that_flips_by_the_clock_is_known_up_to_twice_the_lags():
    """Half as fast in three steps of six, without resources: what is left is nearly noise."""
    steady = series("steady", 0)
    flips = np.where(np.arange(len(steady.values))[:, np.newaxis] % 6 < 3, 1.0, 0.5)
    given = replace(steady, values=steady.values * flips)

    assert rmse(Narx(), given, told=False) <= 0.04
    assert rmse(Ema(), given, told=False) >= 0.4


@pytest.mark.parametrize("seed", range(3))
def test_past_values_alone_may_do(seed):
    """Without any resources, a cycle is foreseen at half the average's error."""
    given = series("cycle", seed)

    assert rmse(Narx(), given, told=False) <= 0.5 * rmse(Ema(), given)


def test_it_is_the_fallback_to_begin_with():
    """The very numbers, for as long as no network has decided."""
    given = series("neighbours", 0, num_steps=25)
    for fallback in (Ema(), LocalLevel(), Ema(1.0)):
        forecasts, own = foresee(Narx(fallback=fallback), given)
        average, _ = foresee(fallback, given)

        assert not own.any()
        assert forecasts.tolist() == average.tolist()


@pytest.mark.parametrize("kind", ["wandering", "drift", "odd steps"])
def test_it_takes_over_a_tenth_better_and_gives_way_when_worse(kind):
    """In between it stays as it is, so that nobody goes to and fro with every step."""
    given, predictor = series(kind, 0), Narx(fallback=Ema())
    state, taken, given_way = predictor.init(8), [], []
    for step in range(499):
        before = predictor.decides(state)
        state = predictor.update(state, given.values[step], given.resources(step))
        own_error, other_error = state["errors"]
        now, ratio = predictor.decides(state), own_error / np.maximum(other_error, 1e-9)
        taken.extend(ratio[now & ~before])
        given_way.extend(ratio[before & ~now])

    assert len(taken) >= 8
    assert max(taken) < 0.9
    assert min(given_way, default=2) > 1


def test_what_is_below_a_percent_is_not_learnt():
    """A swing of a millionth is as good as rounding: the average decides."""
    cycle = series("cycle", 0)
    swing = 1 + 1e-6 * np.sin(np.arange(len(cycle.values)))[:, np.newaxis]
    given = replace(cycle, values=swing * np.arange(1, 9))

    _, own = foresee(Narx(), given)

    assert not own.any()


def test_it_gives_way_when_what_it_learnt_is_void():
    """From one step to the next the CPU says nothing any more: the average is back in a while."""
    known, void = series("neighbours", 0, num_steps=300), series("steady", 0)
    predictor, state = Narx(), Narx().init(8)
    for step in range(299):
        state = predictor.update(state, known.values[step], known.resources(step))
    assert predictor.decides(state).all()

    for step in range(100):
        state = predictor.update(state, void.values[step], void.resources(step))

    assert not predictor.decides(state).any()


def test_one_odd_step_does_not_unseat_it():
    """A pause is no fault of the network's: it is as much of a surprise to the average."""
    given, predictor = series("neighbours", 1, num_steps=320), Narx()
    state, decided = predictor.init(8), []
    for step in range(319):
        pause = 0.1 if step == 300 else 1.0
        state = predictor.update(state, pause * given.values[step], given.resources(step))
        decided.append(predictor.decides(state))

    assert np.all(decided[300:])


def test_loads_never_seen_are_not_taken_past_all_bounds():
    """A forecast stays within four standard deviations of what was seen."""
    given, predictor = series("restless load", 0), Narx()
    state = predictor.init(8)
    for step in range(400):
        state = predictor.update(state, given.values[step], given.resources(step))
    nothing_left = Resources(np.zeros(8), np.zeros(8, np.int64))
    state = predictor.update(state, given.values[400], nothing_left)

    logs = np.log(given.values[270:401])
    far = abs(np.log(predictor.predict(state)) - logs.mean(axis=0)) / logs.std(axis=0)
    assert (far <= 4.1).all()


def test_the_gradient_is_that_of_the_huber_loss():
    """By differences, for every weight."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((2, len(fresh_weights(4, 3, seed=0))))
    inputs, targets = rng.standard_normal((2, 9, 4)), 2 * rng.standard_normal((2, 9))
    known = (rng.random((2, 9)) < 0.7).astype(float)

    def loss(weights):
        off = abs(outputs_of(weights, inputs) - targets)
        huber = np.where(off < 1, 0.5 * off**2, off - 0.5)
        return (huber * known).sum(axis=1) / known.sum(axis=1)

    gradient = gradient_of(weights, inputs, targets, known)
    for index in range(weights.shape[1]):
        nudge = 1e-6 * (np.arange(weights.shape[1]) == index)
        slope = (loss(weights + nudge) - loss(weights - nudge)) / 2e-6
        np.testing.assert_allclose(gradient[:, index], slope, atol=1e-7)


def test_a_fresh_network_says_nothing():
    """0 for any input, and the same weights for the same seed."""
    first, again, other = [fresh_weights(9, 6, seed=seed).tolist() for seed in (3, 3, 4)]

    assert (outputs_of(np.tile(first, (2, 1)), np.ones((2, 5, 9))) == 0).all()
    assert first == again != other
