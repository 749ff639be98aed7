"""A set-up of three quick devices, and contestants that train on it in real processes."""

import numpy as np

from benchmarks.arena._papers import lines
from benchmarks.arena._setups import ArenaSetUp
from benchmarks.arena._traces import static
from benchmarks.arena._world import World
from evenstep import AffineTime

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
