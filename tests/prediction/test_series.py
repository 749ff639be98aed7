"""Facts special to the predictors that look at past values alone, and to `Seasonal`."""

import numpy as np
import pytest

from evenstep.prediction import Ar, Ema, Holt, LocalLevel, Narx, Seasonal, WindowMedian

from .simulated import rmse, series


def after(predictor, values):
    """Return the forecast of a single worker after these values."""
    state = predictor.init(1)
    for value in values:
        state = predictor.update(state, np.array([value], float))
    return predictor.predict(state)[0]


def test_the_last_value_is_repeated():
    """As it was."""
    assert after(Ema(1.0), [3.0, 1.7]) == 1.7


def test_the_average_starts_as_a_plain_mean():
    """Of 1/alpha values; from then on the newest weighs alpha."""
    assert after(Ema(0.25), [4.0, 2.0, 6.0]) == pytest.approx(4.0)
    assert after(Ema(0.25), [4.0] * 10 + [8.0]) == pytest.approx(5.0)


@pytest.mark.parametrize("seed", range(3))
def test_the_average_leaves_a_third_of_the_jitter(seed):
    """At 0.2: of 3 % noise, 1 % is left in the forecast."""
    noisy = 50 * np.exp(0.03 * np.random.default_rng(seed).standard_normal(4000))
    state, forecasts = Ema(0.2).init(1), []
    for value in noisy:
        state = Ema(0.2).update(state, np.array([value]))
        forecasts.append(Ema(0.2).predict(state)[0])

    assert np.std(np.log(forecasts[20:])) == pytest.approx(0.01, rel=0.1)


def test_the_median_ignores_a_spike():
    """Four odd values among nine leave no trace, the fifth does."""
    usual = [5.0, 5.1, 4.9, 5.0, 5.0]

    assert after(WindowMedian(9), [*usual, 100.0]) == 5.0
    assert 4.9 <= after(WindowMedian(9), [*usual, 100.0, 100.0, 100.0, 100.0]) <= 5.1
    assert after(WindowMedian(9), [*usual, *[100.0] * 5]) == 100.0


def test_the_median_of_an_even_number_is_the_mean_of_two():
    """Also before the window is full."""
    assert after(WindowMedian(4), [1.0, 2.0]) == 1.5
    assert after(WindowMedian(4), [9.0, 1.0, 2.0, 4.0, 8.0]) == 3.0


@pytest.mark.parametrize("growth", [0.02, -0.03])
def test_holt_follows_a_ramp_as_closely_as_promised(growth):
    """0.89 steps' growth behind, where the average is five steps behind."""
    ramp = np.exp(growth * np.arange(201))
    behind = {}
    for predictor in (Holt(), Ema(0.2)):
        behind[predictor.name] = np.log(ramp[-1] / after(predictor, ramp[:-1])) / growth

    assert behind["holt"] == pytest.approx(0.1 / (0.4 * (0.1 + 0.2 * 0.9)), rel=0.01)
    assert behind["ema"] == pytest.approx(5, rel=0.15)


def test_a_trend_past_all_floats_stays_a_number():
    """Where values explode, so would an undamped trend."""
    forecast = after(Holt(1.0, 1.0, 1.0), 10.0 ** np.arange(-300, 301, 150))

    assert np.isfinite(forecast)


@pytest.mark.parametrize("seed", range(3))
def test_the_local_level_is_near_the_best_average_of_either_kind(seed):
    """On steady and on wandering workers, within 8 % of the best of many averages."""
    for kind in ("steady", "wandering"):
        given = series(kind, seed)
        best = min(rmse(Ema(alpha), given) for alpha in (0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0))

        assert rmse(LocalLevel(), given) <= 1.08 * best, kind


def test_the_local_level_tells_odd_steps_from_lasting_changes():
    """At 3 % of jitter: one odd value and the way back leave 5 %, a second one is followed."""
    noisy = 50 * np.exp(0.03 * np.random.default_rng(0).standard_normal(100))

    assert after(LocalLevel(), [*noisy, 100.0]) == pytest.approx(50, rel=0.2)
    assert after(LocalLevel(), [*noisy, 100.0, 50.0]) == pytest.approx(50, rel=0.05)
    assert after(LocalLevel(), [*noisy, 100.0, 100.0]) == pytest.approx(100, rel=0.1)


def test_two_weights_hold_a_sine_wave():
    """Without noise the next value is known to a tenth of a percent; averages are far off."""
    wave = np.exp(0.3 * np.sin(2 * np.pi * np.arange(301) / 11))

    assert after(Ar(2), wave[:-1]) == pytest.approx(wave[-1], rel=1e-3)
    assert after(Ema(0.2), wave[:-1]) != pytest.approx(wave[-1], rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_an_autoregression_foresees_a_noisy_swing(seed):
    """At less than half the error of the average."""
    given = series("cycle", seed)

    assert rmse(Ar(), given) <= 0.5 * rmse(Ema(), given)


def test_explosive_weights_are_cut_off():
    """Values that tripled at every step are foreseen to double, and no more."""
    tripling = 3.0 ** np.arange(30)

    assert after(Ar(2), tripling) == pytest.approx(2 * tripling[-1], rel=1e-6)


def test_a_long_steady_run_ends_well():
    """Nothing winds up in ten thousand values that are all the same, and the next change counts."""
    for predictor in (Ar(), LocalLevel(), Holt()):
        state = predictor.init(1)
        for _ in range(10_000):
            state = predictor.update(state, np.array([5.0]))
        assert predictor.predict(state)[0] == pytest.approx(5.0), predictor
        for _ in range(40):
            state = predictor.update(state, np.array([7.0]))
        assert predictor.predict(state)[0] == pytest.approx(7.0, rel=0.02), predictor


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (Ar, {"order": 0}),
        (Ar, {"memory": 1.5}),
        (Ema, {"alpha": 0.0}),
        (Ema, {"alpha": float("nan")}),
        (Holt, {"alpha": 0.0}),
        (Holt, {"beta": 1.5}),
        (Holt, {"damping": -0.1}),
        (LocalLevel, {"memory": 1.0}),
        (LocalLevel, {"first_noise": 0.0}),
        (Narx, {"window": 15}),
        (Narx, {"lags": 0}),
        (Narx, {"num_hidden": 0}),
        (Narx, {"learning_rate": 0.0}),
        (Narx, {"seed": -1}),
        (WindowMedian, {"window": 0}),
        (Ar, {"order": float("inf")}),
        (LocalLevel, {"first_noise": float("inf")}),
        (Narx, {"window": 16.5}),
        (Narx, {"lags": float("inf")}),
        (Narx, {"num_hidden": 2.5}),
        (Narx, {"learning_rate": float("inf")}),
        (Narx, {"seed": float("inf")}),
        (WindowMedian, {"window": 2.5}),
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(cls, settings):
    """The message names class and argument."""
    with pytest.raises(ValueError, match=rf"`{cls.__name__}\({next(iter(settings))}=...\)` must"):
        cls(**settings)


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
