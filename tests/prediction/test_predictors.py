"""Every exported predictor keeps the promises, and the contract catches broken ones."""

import inspect
from dataclasses import dataclass, field

import numpy as np
import pytest

from evenstep import prediction
from evenstep.prediction import AbstractPredictor, Ema
from evenstep.testing import PredictorContract

EXPORTED = [
    cls()
    for cls in (getattr(prediction, name) for name in prediction.__all__)
    if inspect.isclass(cls)
    and issubclass(cls, prediction.AbstractPredictor)
    and not inspect.isabstract(cls)
]
# Settings that take another way through the code than the defaults.
OTHERS = [
    prediction.Ar(order=1, memory=1.0),
    prediction.Ar(order=5),
    prediction.Ema(alpha=1.0),
    prediction.Holt(alpha=1.0, beta=1.0, damping=1.0),
    prediction.LocalLevel(memory=0.0),
    prediction.Narx(window=16, lags=1, num_hidden=1, fallback=prediction.LocalLevel()),
    prediction.WindowMedian(window=1),
    prediction.WindowMedian(window=4),
]


def name_of(predictor):
    """Return a short name for the report."""
    return predictor.name


class TestEveryPredictor(PredictorContract):
    @pytest.fixture(params=EXPORTED, ids=name_of)
    def predictor(self, request):
        return request.param


class TestOtherSettings(PredictorContract):
    @pytest.fixture(params=OTHERS, ids=repr)
    def predictor(self, request):
        return request.param


@dataclass(frozen=True)
class Broken(AbstractPredictor):
    """`Ema` with one fault."""

    fault: str
    predictor: AbstractPredictor = field(default_factory=Ema)

    def init(self, world_size):
        state = self.predictor.init(world_size)
        kept = {"keeps an object": self, "keeps NaN": np.full(world_size, np.nan)}
        return {**state, "kept": kept[self.fault]} if self.fault in kept else state

    def update(self, state, values, resources=None):
        if self.fault == "edits its inputs":
            values[0] = 1.0
        if self.fault == "edits its state":
            state["num_steps"] += 1
        if self.fault == "spreads NaN":
            values = np.where(np.isnan(values).any(), np.nan, values)
        if self.fault == "needs resources":
            values = values * (1 + 0 * resources.free_cpu)
        if self.fault == "takes no value for the last":
            values = np.where(np.isnan(values), state["mean"] * 1.01, values)
        return {**state, **self.predictor.update(state, values, resources)}

    def predict(self, state):
        mean = state["mean"]
        wrong = {
            "knows units": lambda: mean + 0.1,
            "knows ranks": lambda: mean * np.linspace(1, 2, len(mean)),
            "sees the others": lambda: 0.5 * mean + 0.5 * mean.mean(),
            "falls below zero": lambda: mean - 2 * mean.min(),
            "is a percent off": lambda: 1.01 * mean,
            "draws lots": lambda: mean * np.random.default_rng().uniform(0.9, 1.1, len(mean)),
            "hands out its state": lambda: mean,
            "divides by zero": lambda: mean * (1 / np.zeros(1) > 0),
        }
        return wrong.get(self.fault, lambda: self.predictor.predict(state))()


def promises_broken_by(predictor, *, among="test_"):
    """Return the names of the contract's tests, those that begin so, which ``predictor`` fails."""
    contract, broken = PredictorContract(), set()
    for name in (name for name in dir(contract) if name.startswith(among)):
        test, settings = getattr(contract, name), [{}]
        for mark in getattr(test, "pytestmark", []):
            parameter, values = mark.args
            settings = [{parameter: value} for value in values]
        for arguments in settings:
            try:
                with np.errstate(all="ignore"):
                    test(predictor, **arguments)
            except (Exception, pytest.fail.Exception):
                broken.add(name)
    return broken


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("divides by zero", "test_forecasts_are_positive"),
        ("draws lots", "test_the_same_series_gives_the_same_forecasts"),
        ("edits its inputs", "test_forecasts_are_positive"),
        ("edits its state", "test_arguments_are_left_alone"),
        ("falls below zero", "test_forecasts_are_positive"),
        ("hands out its state", "test_arguments_are_left_alone"),
        ("is a percent off", "test_a_constant_is_learnt"),
        ("keeps an object", "test_resuming_changes_nothing"),
        ("keeps NaN", "test_resuming_changes_nothing"),
        ("knows ranks", "test_numbering_does_not_matter"),
        ("knows units", "test_units_do_not_matter"),
        ("needs resources", "test_resources_may_be_missing"),
        ("sees the others", "test_workers_do_not_see_each_other"),
        ("spreads NaN", "test_gaps_of_one_worker_are_nothing_to_another"),
        ("takes no value for the last", "test_a_worker_that_was_not_measured_keeps_its_forecast"),
    ],
)
def test_a_fault_breaks_its_promise(fault, promise):
    """One predictor for each promise, wrong in one way."""
    assert promises_broken_by(Broken(fault), among=promise) == {promise}


def test_a_sound_predictor_breaks_none():
    """The harness above finds no faults where there are none."""
    assert promises_broken_by(Broken("none")) == set()
