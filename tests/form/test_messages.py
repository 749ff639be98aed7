"""What a user gave wrong is named by the words that the user wrote, with what would do."""

import re

import pytest

from evenstep._planner import Bounds, Job, Planner
from evenstep.policies import Auto, Deadband, Every, Fixed, by_name
from evenstep.torch import Balancer


class Bare:
    """A policy but for its base class."""

    def init(self, cluster):
        """Decide nothing."""

    def update(self, cluster, timings, state):
        """Decide nothing."""


def plan(policy=None, *, total=96, smallest=1, **bounds):
    """Plan for three workers."""
    return Planner(policy or Auto(), Job(3, total, bounds=Bounds(**bounds), smallest=smallest))


POLICY = "`Balancer(policy=...)` must be a name, 'module:Class', or a policy, got "
INHERIT = "Have `Bare` inherit from `evenstep.policies.AbstractPolicy`."
MESSAGES = {
    "a policy in the place of the size": (
        lambda: Balancer("lbb"),
        "`Balancer(global_batch_size=...)` must be an integer >= 1, got 'lbb'. Leave it out to "
        "take the loader's batch size times the number of workers; a policy goes by its name, "
        "`Balancer(policy=...)`.",
    ),
    "a size in fractions": (lambda: Balancer(96.0), "must be an integer >= 1, got 96.0."),
    "no size": (lambda: Balancer(0), "must be an integer >= 1, got 0."),
    "a class": (lambda: Balancer(policy=Auto), "Give an instance, `Auto(...)`, not the class."),
    "no base class": (lambda: Balancer(policy=Bare()), INHERIT),
    "no base class, and a class": (lambda: Balancer(policy=Bare), INHERIT),
    "a number": (lambda: Balancer(policy=3), f"{POLICY}3. Give an instance, such as `Auto()`."),
    "a name in a wrapper": (
        lambda: Deadband("auto", 0.1),
        "`Deadband(policy=...)` must be a policy, got 'auto'. Give an instance",
    ),
    "a class in a wrapper": (lambda: Every(Auto, 2), "`Auto(...)`, not the class."),
    "no base class in a wrapper": (lambda: Every(Bare(), 2), INHERIT),
    "an unknown name": (
        lambda: by_name("fixd"),
        "`by_name(name=...)` must be one of auto, dbs, dynamic-batching, equal, lb-bsp-2018, "
        "lb-bsp-2020, lbb or 'module:Class', got 'fixd'. Did you mean 'fixed'? "
        "deadband, every, fixed need settings: pass an instance.",
    ),
    "a name that needs settings": (
        lambda: Balancer(policy="deadband"),
        "got 'deadband', which needs policy, threshold. Pass an instance: `Deadband(policy=..., "
        "threshold=...)`.",
    ),
    "caps below the global batch": (
        lambda: plan(max=6),
        "`Bounds(max=...)` must add up to the global batch of 96 at least, in whole granules, got "
        "6 each, 18 in all. Raise it,",
    ),
    "caps below it in granules": (
        lambda: plan(max=(40, 40, 31), granularity=16),
        "`Bounds(max=...)` must add up to the global batch of 96 at least, in whole granules, got "
        "32 32 16, 80 in all.",
    ),
    "least sizes above the global batch": (
        lambda: plan(min=40),
        "`Bounds(min=...)` must add up to the global batch of 96 at most, in whole granules, got "
        "40 each, 120 in all. Lower it,",
    ),
    "granules above the global batch": (
        lambda: plan(granularity=(8, 64, 64)),
        "`Bounds(granularity=...)` must leave every worker its least of the global batch of 96, in "
        "whole granules, got 8 64 64, 136 in all.",
    ),
    "a model that needs two samples": (
        lambda: plan(total=5, smallest=2),
        "`Balancer(global_batch_size=...)` must leave every worker the least that its model needs, "
        "2 each, 6 in all, got 5. Raise it,",
    ),
    "bounds the wrong way round": (
        lambda: plan(min=(1, 9, 1), max=8, total=20),
        "`Bounds(min=..., max=...)` must satisfy min <= max on every rank, in whole granules, got "
        "9 and 8 in granules of 1 on rank 1.",
    ),
    "caps for two workers": (
        lambda: plan(max=(50, 50)),
        "`Bounds(max=...)` must be one number or 3 of them, got (50, 50).",
    ),
    "least sizes for two workers": (
        lambda: plan(min=(5, 5)),
        "`Bounds(min=...)` must be one number or 3 of them, got (5, 5).",
    ),
    "granules for two workers": (
        lambda: plan(granularity=(5, 5)),
        "`Bounds(granularity=...)` must be one number or 3 of them, got (5, 5).",
    ),
    "sizes that do not add up": (lambda: plan(Fixed((30, 30, 30))), "which add up to 90."),
}


@pytest.mark.parametrize(("mistake", "message"), MESSAGES.values(), ids=MESSAGES)
def test_a_mistake_is_named_in_the_users_words(mistake, message):
    """Class and argument, rule, value and remedy; no `Cluster`, which the user never made."""
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        mistake()

    assert "Cluster(" not in str(caught.value)
