"""Over many steps, uneven plans drift from one process no further than equal splits do."""

import pytest
import torch

from evenstep.policies import Equal
from evenstep.testing import run_workers

from .drift import NUM_STEPS, WORLD_SIZE, distances
from .plans import Restless

pytestmark = pytest.mark.cluster


def found(dtype, *policies):
    """Relative distances after 200 steps of AdamW on a GPT, by policy."""
    return run_workers(WORLD_SIZE, distances, dtype, policies, timeout_s=170)[0]


def test_double_precision_stays_with_one_process():
    """1e-9 after 200 steps, under as many plans."""
    double = found(torch.float64, Restless())

    assert double["changes of restless"] > 0.9 * NUM_STEPS
    assert double["restless"] <= 1e-9


@pytest.mark.slow
def test_single_precision_drifts_no_further_than_equal_splits():
    """At most three times as far; rounding grows in both."""
    single = found(torch.float32, Restless(), Equal())

    assert single["restless"] <= 3 * single["equal"]
    assert single["restless"] > 0
