"""Sizes and shares side by side in the simulator: each planner does what it does alone."""

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, allocate
from evenstep.network import Aggregation, Links, OptimalShares, SharePlanner
from evenstep.network.sim import SharedLinksComm, run_over_links
from evenstep.sim import Workload

SPEEDS = np.array([20.0, 30, 60, 80])
FIXED_S, STEPS, CLUSTER = np.full(4, 0.02), 60, Cluster(4, 64)
AGGREGATION = Aggregation(4, 4_000_000, num_chunks=8)


def ran(mbit, *, noise=0.0, jitter=0.0, policy="lbb"):
    """A run on steady links; policies balance exactly unless there is jitter."""
    links = Links(np.array(mbit) * 125_000.0)
    luck = np.exp(np.random.default_rng(0).normal(0, jitter, (STEPS, 4)))
    return run_over_links(
        policy,
        CLUSTER,
        Workload(FIXED_S, np.tile(1 / SPEEDS, (STEPS, 1)), luck),
        [links] * STEPS,
        SharePlanner(OptimalShares(), AGGREGATION),
        noise=noise,
    )


def test_sizes_balance_computing_and_shares_the_exchange():
    """The sizes of computing alone, and a step as long as the model of both says."""
    mbit = [150, 150, 150, 50]
    found = ran(mbit)
    sizes, shares = found.batch_size[-1], found.plans[-1].shares
    times, links = AffineTime(FIXED_S, 1 / SPEEDS), Links(np.array(mbit) * 125_000.0)

    assert shares is not None
    assert abs(sizes - allocate(times, CLUSTER)).max() <= 1  # a policy's own rounding
    by_shares = SharedLinksComm(AGGREGATION, links, shares)(times.seconds(sizes))
    plain = SharedLinksComm(AGGREGATION, links)(times.seconds(sizes))
    assert found.step_s[-1] == pytest.approx(by_shares)
    assert by_shares < 0.95 * plain


def test_the_same_arguments_give_the_same_run():
    """Noise and all."""
    settings = {"noise": 0.1, "jitter": 0.05, "policy": "auto"}
    one, other = (ran([200, 150, 100, 50], **settings) for _ in range(2))

    assert one.step_s.tolist() == other.step_s.tolist()
    assert one.events == other.events


def test_what_does_not_fit_is_refused():
    """Other workers, and more links than steps."""
    links = Links(np.full(4, 1e6))
    shares = SharePlanner(OptimalShares(), Aggregation(4, 1_000_000))
    workload = Workload(FIXED_S, np.tile(1 / SPEEDS, (3, 1)))
    with pytest.raises(ValueError, match=r"run_over_links\(cluster="):
        run_over_links("auto", Cluster(3, 9), workload, [links], shares)
    with pytest.raises(ValueError, match=r"run_over_links\(links="):
        run_over_links("auto", CLUSTER, workload, [links] * 4, shares)
