"""A period is found where there is one, soon enough, and nowhere else."""

import numpy as np
import pytest

from evenstep.prediction import Seasonal

WORLD_SIZE = 4


def played(values, predictor=None):
    """Return the periods after every step, and the forecasts made before it."""
    predictor = predictor or Seasonal()
    state, periods, forecasts = predictor.init(values.shape[1]), [], []
    for value in values:
        forecasts.append(predictor.predict(state))
        state = predictor.update(state, value)
        periods.append(predictor.periods(state))
    return np.array(periods), np.array(forecasts)


def square(period, num_steps, seed, *, noise=0.02):
    """Return square waves of +-40 %, own phase each."""
    draw = np.random.default_rng(seed)
    phase = draw.uniform(0, 2 * np.pi, WORLD_SIZE)
    wave = np.sin(2 * np.pi * np.arange(num_steps)[:, np.newaxis] / period + phase)
    return (1 + 0.4 * np.sign(wave)) * draw.lognormal(0, noise, (num_steps, WORLD_SIZE))


@pytest.mark.parametrize("period", [14, 37, 90, 200])
@pytest.mark.parametrize("seed", range(3))
def test_the_period_of_a_square_wave_is_found(period, seed):
    """Exactly, of several that fit the shortest, and soon after a period and a half."""
    values = square(period, int(1.5 * period) + 40, seed)

    periods, _ = played(values)

    assert (periods[-1] == period).all()
    assert ((periods == 0) | (periods == period)).mean() > 0.95


def test_flips_are_foreseen():
    """Where the last value is off by half or more, twice a period."""
    values = square(60, 400, seed=5)
    _, forecasts = played(values)

    off = abs(np.log(forecasts / values))[200:]
    last = abs(np.log(values[199:-1] / values[200:]))

    assert (last > 0.5).sum() >= 20
    assert (off > 0.5).mean() < 0.1 * (last > 0.5).mean()


@pytest.mark.parametrize(
    "kind", ["constant", "steady", "one lasting change", "a random walk", "single odd steps"]
)
@pytest.mark.parametrize("seed", range(3))
def test_what_does_not_come_again_has_no_period(kind, seed):
    """At most now and then by chance; the forecast is the last value."""
    draw = np.random.default_rng(seed)
    values = draw.lognormal(0, 0.02, (400, WORLD_SIZE))
    if kind == "constant":
        values[:] = 0.01
    elif kind == "one lasting change":
        values[150:] *= 2
    elif kind == "a random walk":
        values = np.exp(np.cumsum(0.03 * draw.standard_normal(values.shape), axis=0))
    elif kind == "single odd steps":
        values *= np.where(draw.random(values.shape) < 0.02, 3.0, 1.0)

    periods, forecasts = played(values)

    free = periods[:-1] == 0
    assert free.mean() > 0.9
    assert forecasts[1:][free] == pytest.approx(values[:-1][free], rel=1e-6)


def test_every_worker_is_looked_at_in_turn():
    """Of more than are looked at in one step."""
    values = np.tile(square(20, 200, seed=7), (1, 500))

    periods, _ = played(values)

    assert (periods[-1] == 20).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"longest": 15},
        {"longest": 99.5},
        {"longest": float("inf")},
        {"overlap": 1.0},
        {"evidence": 0.0},
        {"evidence": 1.0},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings):
    """By name."""
    (name,) = settings
    with pytest.raises(ValueError, match=rf"Seasonal\({name}=...\)"):
        Seasonal(**settings)
