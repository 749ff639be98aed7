"""The contract catches what it is there for: policies broken on purpose fail it."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from evenstep import Decision
from evenstep.policies import AbstractPolicy, Auto, Equal
from evenstep.testing import AdaptivePolicyContract, PolicyContract


@dataclass(frozen=True)
class Broken(AbstractPolicy):
    """`Auto` with one fault."""

    fault: str
    policy: AbstractPolicy = field(default_factory=Auto)

    def init(self, cluster):
        return self._spoil(self.policy.init(cluster), cluster)

    def update(self, cluster, timings, state):
        if self.fault == "edits its inputs":
            timings.compute_s[0] = 1.0
        if self.fault == "spreads NaN":
            mean = np.mean(timings.compute_s)
            return Decision(self.policy.init(cluster).batch_size, {"mean": mean.item()}, "mean")
        if self.fault == "ignores new bounds":
            free = replace(cluster, max_batch_size=cluster.global_batch_size)
            return self.policy.update(free, timings, state)
        return self._spoil(self.policy.update(cluster, timings, state), cluster)

    def _spoil(self, decision, cluster):
        sizes = decision.batch_size.copy()
        if self.fault == "loses a sample":
            sizes[0] -= 1
        if self.fault == "favours the last rank" and len(sizes) > 1:
            sizes[[0, -1]] = sizes[[-1, 0]]
        if self.fault == "swaps two ranks' sizes" and len(sizes) > 2:
            sizes = np.roll(sizes, 1)
        if self.fault == "rounds in floats":
            return replace(decision, batch_size=sizes.astype(float))
        if self.fault == "has no reason":
            return replace(decision, reason=" ")
        if self.fault == "keeps an object":
            return replace(decision, state={**decision.state, "policy": self.policy})
        if self.fault == "draws lots":
            return replace(decision, reason=str(np.random.default_rng().random()))
        return replace(decision, batch_size=sizes)


def promises_broken_by(contract, policy):
    """Return the names of the contract's tests that ``policy`` fails."""
    broken = []
    for name in (name for name in dir(contract) if name.startswith("test_")):
        test = getattr(contract, name)
        settings = [{}]
        for mark in getattr(test, "pytestmark", []):
            parameter, values = mark.args
            settings = [{parameter: value} for value in list(values)[:8]]
        for arguments in settings:
            try:
                test(policy, **arguments)
            except (Exception, pytest.fail.Exception):
                broken.append(name)
                break
    return broken


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("loses a sample", "test_batch_sizes_are_feasible"),
        ("rounds in floats", "test_batch_sizes_are_feasible"),
        ("swaps two ranks' sizes", "test_numbering_does_not_matter"),
        ("favours the last rank", "test_ties_go_to_the_lower_rank"),
        ("has no reason", "test_decisions_are_plain"),
        ("keeps an object", "test_decisions_are_plain"),
        ("draws lots", "test_the_same_timings_give_the_same_decisions"),
        ("edits its inputs", "test_batch_sizes_are_feasible"),
        ("spreads NaN", "test_a_worker_without_samples_is_left_out"),
        ("ignores new bounds", "test_bounds_that_tighten_are_kept"),
    ],
)
def test_a_fault_breaks_its_promise(fault, promise):
    """One policy for each promise, wrong in one way."""
    assert promise in promises_broken_by(PolicyContract(), Broken(fault))


def test_a_policy_that_does_not_react_is_no_adaptive_one():
    """Equal sizes are no answer to unequal speeds."""
    broken = promises_broken_by(AdaptivePolicyContract(), Equal())

    assert broken == [
        "test_recovered_straggler_gets_its_share_back",
        "test_twice_as_fast_gets_twice_the_samples",
    ]


def test_a_sound_policy_breaks_none():
    """The harness above finds no faults where there are none."""
    assert promises_broken_by(PolicyContract(), Auto()) == []
    assert promises_broken_by(AdaptivePolicyContract(), Auto()) == []
