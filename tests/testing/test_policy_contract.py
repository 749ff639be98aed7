"""The contract catches what it is there for: policies broken on purpose fail it."""

import re
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
        changes = {
            "rounds in floats": lambda: {"batch_size": sizes.astype(float)},
            "has no reason": lambda: {"reason": " "},
            "keeps an object": lambda: {"state": {**decision.state, "policy": self.policy}},
            "promises too much": lambda: {"level": 1.0},
            "draws lots": lambda: {"reason": str(np.random.default_rng().random())},
        }
        return replace(decision, **changes.get(self.fault, lambda: {"batch_size": sizes})())


def promises_broken_by(contract, policy, *, among="test_"):
    """Return the names of the contract's tests that ``policy`` fails."""
    broken = []
    for name in (name for name in dir(contract) if name.startswith(among)):
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
        ("promises too much", "test_a_level_step_leaves_the_sizes"),
        ("draws lots", "test_the_same_timings_give_the_same_decisions"),
        ("edits its inputs", "test_batch_sizes_are_feasible"),
        ("spreads NaN", "test_a_worker_without_samples_is_left_out"),
        ("ignores new bounds", "test_bounds_that_tighten_are_kept"),
    ],
)
def test_a_fault_breaks_its_promise(fault, promise):
    """One policy for each promise, wrong in one way."""
    assert promises_broken_by(PolicyContract(), Broken(fault), among=promise) == [promise]


def test_a_broken_promise_is_one_line_without_a_traceback():
    """With the seed and what was decided, and no inside of the contract."""
    with pytest.raises(pytest.fail.Exception) as caught:
        PolicyContract().test_batch_sizes_are_feasible(Broken("loses a sample"))

    assert not caught.value.pytrace
    assert re.fullmatch(
        r"seed 0: Broken gave \[.*\], which add up to \d+ and not to the global batch of \d+",
        str(caught.value),
    )


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
