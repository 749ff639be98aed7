"""Every exported predictor keeps the promises; export one more and it is tested."""

import inspect

import pytest

from evenstep import prediction
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
