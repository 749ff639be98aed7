"""A policy of your own, and the tests that certify it: `pytest own_policy.py`."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from evenstep import AffineTime, Decision, allocate
from evenstep.policies import AbstractPolicy, Equal
from evenstep.testing import AdaptivePolicyContract, PolicyContract


@dataclass(frozen=True)
class LastStep(AbstractPolicy[np.ndarray]):
    """Takes every step's times for the truth."""

    name: ClassVar[str] = "last-step"

    def init(self, cluster):
        slope_s = np.zeros(cluster.world_size)  # the state: seconds per sample, 0 is not known
        return Decision(Equal().init(cluster).batch_size, slope_s, "equal: nothing is measured")

    def update(self, cluster, timings, state):
        ran = timings.batch_size > 0  # the time of a worker without samples means nothing
        slope_s = np.divide(timings.compute_s, timings.batch_size, out=state.copy(), where=ran)
        slope_s = np.where(slope_s > 0, slope_s, slope_s[ran].mean())
        times = AffineTime(np.zeros(len(slope_s)), slope_s)
        return Decision(allocate(times, cluster), slope_s, "as the last step was")


class TestLastStep(PolicyContract, AdaptivePolicyContract):
    @pytest.fixture
    def policy(self):
        return LastStep()
