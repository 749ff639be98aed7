"""Every exported policy keeps the promises; export one more and it is tested."""

import inspect

import pytest

from evenstep import policies
from evenstep.prediction import Ema
from evenstep.testing import AdaptivePolicyContract, PolicyContract

# A policy that cannot be built without arguments, such as a wrapper, gets its instance here.
BY_HAND = {
    policies.Deadband: policies.Deadband(policies.Lbb(), 0.05),
    policies.Every: policies.Every(policies.Lbb(), 3),
}
# `Fixed` names its ranks, so that renumbering those changes the answer.
BY_ITSELF = {policies.Fixed}
EXPORTED = [
    BY_HAND.get(cls) or cls()
    for cls in (getattr(policies, name) for name in policies.__all__)
    if inspect.isclass(cls) and not inspect.isabstract(cls) and cls not in BY_ITSELF
]
# Settings that take another way than the defaults: epochs short enough to end, the rule for CPUs.
OTHERS = [
    policies.Dbs(num_steps=1),
    policies.Dbs(num_steps=3),
    policies.LbBsp2018(predictor=Ema()),
    policies.LbBsp2018(predictor=Ema(1.0)),
    policies.LbBsp2020(delta=0.2),
    pytest.param(policies.Deadband(policies.Auto(), 0.05), marks=pytest.mark.slow),
    pytest.param(policies.Every(policies.Auto(), 3), marks=pytest.mark.slow),
]
ADAPTIVE = [
    policies.Auto(),
    policies.Dbs(num_steps=5),
    pytest.param(policies.Deadband(policies.Auto(), 0.01), marks=pytest.mark.slow),
    policies.Deadband(policies.DynamicBatching(), 0.01),
    policies.Deadband(policies.Lbb(), 0.01),
    policies.DynamicBatching(),
    pytest.param(policies.Every(policies.Auto(), 5), marks=pytest.mark.slow),
    policies.Every(policies.DynamicBatching(), 5),
    policies.Every(policies.Lbb(), 5),
    policies.LbBsp2018(),
    policies.LbBsp2018(predictor=Ema()),
    policies.Lbb(),
]


def name_of(policy):
    """Return a short name for the report."""
    inner = getattr(policy, "policy", None)
    return policy.name if inner is None else f"{policy.name}-{inner.name}"


class TestEveryPolicy(PolicyContract):
    @pytest.fixture(params=EXPORTED + OTHERS, ids=name_of)
    def policy(self, request):
        return request.param


class TestAdaptivePolicies(AdaptivePolicyContract):
    @pytest.fixture(params=ADAPTIVE, ids=name_of)
    def policy(self, request):
        return request.param


class TestPoliciesThatMoveAFewSamplesAtATime(AdaptivePolicyContract):
    steps_to_settle = 300

    @pytest.fixture(
        params=[policies.LbBsp2020(), policies.Deadband(policies.LbBsp2020(), 0.01)], ids=name_of
    )
    def policy(self, request):
        return request.param
