"""Policies are found by name."""

from inspect import isabstract, isclass

import pytest

from evenstep import policies
from evenstep.policies import by_name


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("auto", policies.Auto),
        ("dbs", policies.Dbs),
        ("dynamic-batching", policies.DynamicBatching),
        ("equal", policies.Equal),
        ("lb-bsp-2018", policies.LbBsp2018),
        ("lb-bsp-2020", policies.LbBsp2020),
        ("lbb", policies.Lbb),
        ("evenstep.policies:Lbb", policies.Lbb),
    ],
)
def test_a_name_gives_the_policy_with_its_defaults(name, cls):
    """Its own name, or where its class is."""
    assert by_name(name) == cls()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("magic", r"must be one of auto, .*lbb.* or 'module:Class', got 'magic'"),
        ("fixed", r"needs no settings, got 'fixed', which needs batch_size\. Pass .*`Fixed\(batch"),
        ("deadband", r"which needs policy, threshold"),
        ("nowhere.at_all:Mine", r"can be imported, got 'nowhere.at_all:Mine' \(No module"),
        ("evenstep.policies:Mine", r"has no attribute 'Mine'"),
        (":Mine", r"can be imported"),
        ("evenstep:Cluster", r"must name a subclass of `AbstractPolicy`"),
        ("evenstep:allocate", r"must name a subclass of `AbstractPolicy`"),
    ],
)
def test_a_wrong_name_is_answered_with_what_would_do(name, message):
    """The names there are, the arguments missing, or what failed to import."""
    with pytest.raises(ValueError, match=message):
        by_name(name)


def test_every_policy_has_a_name_of_its_own():
    """Two alike would make one of them unreachable."""
    public = (getattr(policies, name) for name in policies.__all__)
    names = [value.name for value in public if isclass(value) and not isabstract(value)]

    assert all(names)
    assert len(set(names)) == len(names)
