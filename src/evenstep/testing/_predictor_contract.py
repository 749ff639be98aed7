"""The promises a predictor keeps, written as a test class to inherit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .._run._estimates import decode, encode
from .._types import FloatArray, Resources
from ..prediction import AbstractPredictor


class PredictorContract:
    """What every predictor promises.

    Attributes:
        steps_to_settle: steps after which a series that never changed has to be foreseen. Set it
            higher for one that learns slowly.

    Usage:
        class TestMine(PredictorContract):
            @pytest.fixture
            def predictor(self):
                return Mine()
    """

    steps_to_settle = 30

    @pytest.mark.parametrize("seed", range(5))
    def test_forecasts_are_positive(self, predictor: AbstractPredictor[Any], seed: int) -> None:
        """Positive and finite numbers, one for every worker, whatever the values were."""
        values, resources = random_series(seed)
        values = values ** np.random.default_rng(seed).uniform(0.1, 20)

        forecasts = foresee(predictor, values, resources)

        assert forecasts.shape == values.shape
        assert forecasts.dtype == np.float64
        assert (np.isfinite(forecasts) & (forecasts > 0)).all()

    @pytest.mark.parametrize("seed", range(3))
    def test_the_same_series_gives_the_same_forecasts(
        self, predictor: AbstractPredictor[Any], seed: int
    ) -> None:
        """Nothing but the arguments counts: no clock, no random numbers, no memory outside."""
        values, resources = random_series(seed)

        one = foresee(predictor, values, resources)
        other = foresee(predictor, values, resources)

        assert one.tolist() == other.tolist()

    @pytest.mark.parametrize("factor", [1e-3, 7.0])
    def test_units_do_not_matter(self, predictor: AbstractPredictor[Any], factor: float) -> None:
        """Values in other units have forecasts in these units."""
        values, resources = random_series(1)

        one = foresee(predictor, values, resources)
        other = foresee(predictor, factor * values, resources)

        np.testing.assert_allclose(other, factor * one, rtol=1e-6)

    @pytest.mark.parametrize("seed", range(3))
    def test_numbering_does_not_matter(self, predictor: AbstractPredictor[Any], seed: int) -> None:
        """Renumbered workers keep their forecasts."""
        values, resources = random_series(seed)
        order = np.random.default_rng(seed).permutation(values.shape[1])

        one = foresee(predictor, values, resources)
        other = foresee(predictor, values[:, order], [pick(each, order) for each in resources])

        np.testing.assert_allclose(other, one[:, order], rtol=1e-9)

    @pytest.mark.parametrize("world_size", [2, 1000])
    def test_workers_do_not_see_each_other(
        self, predictor: AbstractPredictor[Any], world_size: int
    ) -> None:
        """A worker by itself has the forecasts that it has among a thousand."""
        values, resources = random_series(2, num_steps=20, world_size=world_size)
        last = np.array([world_size - 1])

        among = foresee(predictor, values, resources)
        alone = foresee(predictor, values[:, last], [pick(each, last) for each in resources])

        np.testing.assert_allclose(alone, among[:, last], rtol=1e-9)

    def test_a_worker_that_was_not_measured_keeps_its_forecast(
        self, predictor: AbstractPredictor[Any]
    ) -> None:
        """NaN until its first value; then a step without one changes nothing, bit for bit."""
        values, resources = random_series(3)
        gaps = np.random.default_rng(3).random(values.shape) < 0.3
        gaps[:10, 0], gaps[0, 1:] = True, False

        forecasts = foresee(predictor, np.where(gaps, np.nan, values), resources)

        assert np.isnan(forecasts[:10, 0]).all()
        assert np.isfinite(forecasts[10:, 1:]).all()
        kept = gaps[1:, 1:]
        assert (forecasts[1:, 1:][kept] == forecasts[:-1, 1:][kept]).all()

    def test_gaps_of_one_worker_are_nothing_to_another(
        self, predictor: AbstractPredictor[Any]
    ) -> None:
        """The others' forecasts are the same as without them."""
        values, resources = random_series(4)
        gaps = values.copy()
        gaps[::3, 1] = np.nan

        whole = np.delete(foresee(predictor, values, resources), 1, axis=1)
        others = np.delete(foresee(predictor, gaps, resources), 1, axis=1)

        assert others.tolist() == whole.tolist()

    @pytest.mark.parametrize("resources_known", [True, False])
    def test_a_constant_is_learnt(
        self, predictor: AbstractPredictor[Any], resources_known: bool
    ) -> None:
        """To a tenth of a percent, from a millionth to a million, and it stays learnt."""
        constant = 10.0 ** np.arange(-6, 7)
        values = np.tile(constant, (self.steps_to_settle + 100, 1))
        _, resources = random_series(5, num_steps=len(values), world_size=len(constant))

        forecasts = foresee(predictor, values, resources if resources_known else None)

        settled = forecasts[self.steps_to_settle :]
        np.testing.assert_allclose(settled, values[self.steps_to_settle :], rtol=1e-3)

    def test_resources_may_be_missing(self, predictor: AbstractPredictor[Any]) -> None:
        """Always, at first, or now and then."""
        values, resources = random_series(6)
        now_and_then: list[Resources | None] = list(resources)
        now_and_then[:10], now_and_then[20] = [None] * 10, None

        for known in (None, now_and_then):
            forecasts = foresee(predictor, values, known)

            assert (np.isfinite(forecasts) & (forecasts > 0)).all()

    def test_arguments_are_left_alone(self, predictor: AbstractPredictor[Any]) -> None:
        """Two updates from one state give the same, and what was predicted is the caller's own."""
        values, resources = random_series(7)
        state = state_after(predictor, values, resources)
        before = encode(state)

        first = predictor.update(state, values[0], resources[0])
        predictor.predict(state)[:] = -1.0
        second = predictor.update(state, values[0], resources[0])

        assert encode(state) == before
        assert encode(first) == encode(second)

    @pytest.mark.parametrize("num_steps", [0, 1, 60])
    def test_resuming_changes_nothing(
        self, predictor: AbstractPredictor[Any], num_steps: int
    ) -> None:
        """The state fits any checkpoint, and a run that reads it back continues as if never ended.

        Plain values without a NaN, by which a damaged checkpoint is known.
        """
        values, resources = random_series(8, num_steps=num_steps + 20)
        values[num_steps // 2 : num_steps, 0] = np.nan
        state = state_after(predictor, values[:num_steps], resources)
        resumed = decode(encode(state))  # raises at the first value that is not plain

        assert "nan" not in str(encode(state))

        for row, given in zip(values[num_steps:], resources[num_steps:], strict=True):
            state = predictor.update(state, row, given)
            resumed = predictor.update(resumed, row, given)

            assert predictor.predict(resumed).tolist() == predictor.predict(state).tolist()


def random_series(
    seed: int, *, num_steps: int = 60, world_size: int = 5
) -> tuple[FloatArray, list[Resources]]:
    """Return values that wander, jump and jitter, and resources that explain some of it.

    The values are ``(num_steps, world_size)``, the resources what is known after each step.
    """
    rng = np.random.default_rng(seed)
    shape = (num_steps + 1, world_size)
    free = np.clip(0.5 + np.cumsum(0.1 * rng.standard_normal(shape), axis=0), 0.0, 1.0)
    jumps = np.cumsum(rng.standard_normal(shape) * (rng.random(shape) < 0.03), axis=0)
    speed = rng.lognormal(3, 1, world_size) * np.exp(jumps + 0.05 * rng.standard_normal(shape))
    values = speed * (0.2 + 0.8 * free)
    resources = [Resources(cpu, (1e10 * cpu).astype(np.int64)) for cpu in free[1:]]
    return values[:-1], resources


def pick(resources: Resources, order: Any) -> Resources:
    """Return what these workers have to spare."""
    return Resources(resources.free_cpu[order], resources.free_memory_bytes[order])


def state_after(
    predictor: AbstractPredictor[Any], values: FloatArray, resources: list[Resources]
) -> Any:
    """Return the state after these steps."""
    state = predictor.init(values.shape[1])
    for row, given in zip(values, resources, strict=False):
        state = predictor.update(state, row, given)
    return state


def foresee(
    predictor: AbstractPredictor[Any],
    values: FloatArray,
    resources: list[Any] | None,
) -> FloatArray:
    """Return the forecast after every step, ``(num_steps, world_size)``.

    Any floating-point fault raises: a driver that shows a policy steps which never were, as after
    a restart, takes one for a sign that the policy is lost.
    """
    state = predictor.init(values.shape[1])
    given = [None] * len(values) if resources is None else resources
    forecasts = []
    with np.errstate(all="raise"):
        for row, spare in zip(values, given, strict=True):
            row = row.copy()
            row.flags.writeable = False  # a predictor that edits its inputs fails here
            state = predictor.update(state, row, spare)
            forecasts.append(predictor.predict(state))
    return np.array(forecasts)
