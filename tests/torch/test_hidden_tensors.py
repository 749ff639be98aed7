"""Tensors in an output where no weight reaches them: their part of the gradient would be wrong."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from .test_weighting import Backward, Told, scale


def scaled(output):
    """Return an output as a forward of weight 2 returns it."""
    return scale(output, 2.0, Backward(Told([])))[0]


@pytest.mark.parametrize(
    "hide",
    [
        lambda mean: Independent(Normal(mean, 1.0), 1),
        lambda mean: Independent(TransformedDistribution(Normal(mean, 1.0), [TanhTransform()]), 1),
        lambda mean: SimpleNamespace(scales=[mean]),
        lambda mean: SimpleNamespace(inner=SimpleNamespace(mean=mean)),
        lambda mean: deque([mean]),
    ],
    ids=["a distribution's base", "two deep", "a list of an object", "an object's own", "a deque"],
)
def test_tensors_hidden_deep_are_refused(hide):
    """Beside another tensor that is weighted, too."""
    mean = torch.ones(1, 2, requires_grad=True)

    with pytest.raises(ValueError, match="with tensors that need a gradient"):
        scaled((mean, hide(mean)))


def test_what_hides_no_gradient_is_passed_on():
    """As what a model has sampled."""
    kept = SimpleNamespace(ids=[torch.ones(1)], name="sampled"), deque([torch.ones(1)]), {1}

    given = scaled(kept)

    assert all(one is other for one, other in zip(given, kept, strict=True))
