"""Batch sizes and shares of one plan: all ranks switch both at once, and the gradient is exact."""

import numpy as np
import pytest
import torch

from evenstep._exchange._jointly import Jointly
from evenstep.control import Exchange, JointSizes
from evenstep.events import JointlyPlanned
from evenstep.sharding import Aggregation, Links
from evenstep.testing import run_workers
from evenstep.torch import Network

from .joint import default_jointly, trained_jointly


def apart(one, other):
    one, other = torch.tensor(one), torch.tensor(other)
    return float((one - other).norm() / other.norm())


@pytest.mark.cluster
def test_sizes_and_shares_switch_at_the_same_steps_on_all_ranks():
    """Both drawn anew again and again: the parameters of plain training."""
    plain = run_workers(3, trained_jointly, None)
    found = run_workers(3, trained_jointly, Network(probe=False))
    parameters, sizes, epochs, computed = zip(*found, strict=True)

    assert parameters[0] == parameters[1] == parameters[2]
    assert apart(parameters[0], plain[0][0]) <= 1e-12
    planned = [[step for step, _ in row] for row in sizes]
    assert planned[0] == planned[1] == planned[2]
    assert all(own == step[rank] for rank, row in enumerate(sizes) for step, own in row)
    assert len(set(planned[0])) >= 3
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(set(epochs[0])) >= 3
    assert computed[0] >= 3
    assert {step for step, _ in plain[0][1]} == {(5, 5, 5)}


@pytest.mark.cluster
def test_it_is_had_unless_it_is_declined():
    """By ``Network(joint=False)``; on rank 0, which decides."""
    assert run_workers(3, default_jointly, True) == [True, False, False]
    assert run_workers(3, default_jointly, False) == [False, False, False]


class Failing:
    """Knows nothing of any step."""

    def computing(self, step):
        raise ArithmeticError("no")

    def compensate(self, extra_s):
        raise AssertionError("there is nothing to compensate")


def test_what_fails_ends_joint_sizes_and_training_goes_on():
    """Figures that cannot be are left out without a word: the planner of shares names them."""
    told = []
    aggregation, links = Aggregation(3, 1_000_000), Links(np.full(3, 1e6))
    jointly = Jointly(JointSizes(aggregation), Failing(), told.append)
    jointly.observe(4, Exchange(1, float("nan")), links, np.full(3, 1 / 3))
    assert told == []

    for step in (5, 6):
        jointly.observe(step, Exchange(1, 1.0), links, np.full(3, 1 / 3))
    reason = "internal fault of evenstep (ArithmeticError: no)"
    assert told == [JointlyPlanned(5, (0.0, 0.0, 0.0), None, None, reason)]
