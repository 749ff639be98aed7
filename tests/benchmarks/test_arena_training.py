"""Contestants of the arena train: exact ones as one process does, the others by their equations."""

import numpy as np
import pytest
import torch

from benchmarks._local_sgd import LocalSgd
from benchmarks._stealing import Stealing
from benchmarks.arena._papers import lines
from benchmarks.arena._setups import ArenaSetUp
from benchmarks.arena._traces import static
from benchmarks.arena._world import World, flat
from benchmarks.arena.contestants import (
    Balanced,
    BySizes,
    FirstFew,
    FlexRr,
    LocalSteps,
    ParameterServer,
    Stale,
)
from evenstep import AffineTime
from evenstep.claims import Hybrid
from evenstep.testing import run_workers

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SETUP = ArenaSetUp(
    name="quick",
    rule="lbb",
    times=lines(AffineTime(np.full(3, 0.002), np.array([1e-4, 1e-4, 2e-4]))),
    trace=static(3),
    exchange_s=0.001,
    global_batch_size=48,
    learning_rate=0.1,
    target=0.9,
)


def trained(rank, contestants, num_steps, duration_s=2.0):
    """Parameters after each update, by contestant; None on ranks that updated nothing.

    Each makes ``num_steps`` steps of its own, one after the other.
    """
    found = []
    for contestant in contestants:
        world = World(SETUP, rank, seed=3, duration_s=duration_s, snapshot_s=0.0)
        steps = contestant.train(world)
        next(steps)
        world.clock.start()
        for _ in range(num_steps):
            next(steps)
        steps.close()
        found.append([snapshot.numpy() for _, snapshot in world.log.snapshots] or None)
    return found


ROUNDING = {"rtol": 0, "atol": 1e-5}  # of sums in another order, in single precision


def alone(num_steps, *, first=0, size=48, start=None):
    """Parameters after each SGD step of one process on ``size`` samples from position ``first``."""
    world = World(SETUP, 0, seed=3, duration_s=1.0)
    model = world.network()
    if start is not None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(start), model.parameters())
    optimizer, found = world.optimizer(model), []
    for step in range(num_steps):
        world.loss(model, first + step * size, size).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(flat(model).numpy())
    return found


def test_exact_contestants_train_as_one_process():
    """However unequal the sizes are; and local SGD with a step a round is plain DDP."""
    exact = [
        BySizes((16, 16, 16)),
        BySizes((20, 21, 7)),
        BySizes((24, 24, 0)),
        BySizes((48, 0, 0)),
        Balanced("lbb"),
        Balanced("auto", Hybrid()),
        FlexRr(Stealing()),
        LocalSteps(LocalSgd(1)),
    ]
    found, expected = run_workers(3, trained, exact, 3)[0], alone(3)

    for contestant, snapshots in zip(exact, found, strict=True):
        np.testing.assert_allclose(snapshots, expected, **ROUNDING, err_msg=str(contestant))


def test_local_steps_are_averaged():
    """Two steps of each rank on samples of its own, and the mean of all parameters."""
    (found,) = run_workers(3, trained, [LocalSteps(LocalSgd(2))], 1)[0]
    each = [alone(2, first=32 * rank, size=16)[-1] for rank in range(3)]

    np.testing.assert_allclose(found[0], np.mean(each, axis=0), **ROUNDING)


def test_a_server_that_waits_for_all_trains_as_one_process():
    """SSP without slack, and the mean of the first three of three, with late ones or without."""
    rules = [Stale(0), FirstFew(3), FirstFew(3, drops_stale=True)]
    waiting = [ParameterServer(rule) for rule in rules]
    found, expected = run_workers(4, trained, waiting, 1)[3], alone(3)
    pushes_per_update = [3, 1, 1]

    for rule, snapshots, pushes in zip(rules, found, pushes_per_update, strict=True):
        steps = snapshots[pushes - 1 :: pushes][:3]
        np.testing.assert_allclose(steps, expected, **ROUNDING, err_msg=str(rule))
