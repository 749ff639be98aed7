"""Who trains in the arena, each a value with one method."""

from __future__ import annotations

import numpy as np

from benchmarks._local_sgd import LocalSgd
from benchmarks._stealing import Stealing
from benchmarks.arena._setups import ArenaSetUp
from benchmarks.arena.contestants._balanced import Balanced
from benchmarks.arena.contestants._by_sizes import BySizes
from benchmarks.arena.contestants._contestant import Contestant
from benchmarks.arena.contestants._flexrr import FlexRr
from benchmarks.arena.contestants._local_sgd import LocalSteps
from benchmarks.arena.contestants._parameter_server import ParameterServer
from benchmarks.arena.contestants._push_rules import FirstFew, Stale
from evenstep import Cluster, apportion
from evenstep.claims import Hybrid

__all__ = [
    "Balanced",
    "BySizes",
    "Contestant",
    "FirstFew",
    "FlexRr",
    "LocalSteps",
    "ParameterServer",
    "Stale",
    "contestants",
]


def contestants(setup: ArenaSetUp) -> dict[str, Contestant]:
    """Return all contestants of a set-up by name, exact ones first."""
    world_size, total = setup.world_size, setup.global_batch_size
    slowest, fastest = int(setup.speeds.argmin()), int(setup.speeds.argmax())
    others = np.where(np.arange(world_size) == slowest, 0.0, 1.0)
    exact: dict[str, Contestant] = {
        "ddp": BySizes(_sizes(np.ones(world_size), total)),
        setup.rule: Balanced(setup.rule),
        **{name: Balanced(policy) for name, policy in setup.rivals.items()},
        "auto": Balanced("auto"),
        "hybrid": Balanced("auto", Hybrid()),
        "flexrr": FlexRr(Stealing()),
    }
    if slowest != fastest:  # of machines that are alike these are plain DDP, or half of it
        exact |= {
            "by-hand": BySizes(_sizes(setup.speeds, total)),
            "without-slowest": BySizes(_sizes(others, total)),
            "fastest-alone": BySizes(_sizes(np.arange(world_size) == fastest, total)),
        }
    if not setup.has_inexact:
        return exact
    return exact | {
        "local-sgd": LocalSteps(LocalSgd(8)),
        "local-sgd-by-speed": LocalSteps(LocalSgd(2, by_speed=True)),
        "ssp": ParameterServer(Stale(3)),
        "asp": ParameterServer(Stale()),
        "2-soft": ParameterServer(FirstFew(2)),
        "backup-worker": ParameterServer(FirstFew(world_size - 1, drops_stale=True)),
    }


def _sizes(shares: np.ndarray, total: int) -> tuple[int, ...]:
    """Return whole sizes in proportion to shares; none where a share is 0."""
    cluster = Cluster(len(shares), total, min_batch_size=0)
    return tuple(apportion(shares.astype(np.float64), cluster).tolist())
