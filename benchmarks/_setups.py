"""The machines of the papers, as far as their pages tell how fast these were."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep import AffineTime, Cluster

PER_WORKER = 128
"""Samples of a worker at the equal split: LBB's, and ours where a paper's is not known."""
BALANCED = np.array([167, 167, 158, 20])
"""LBB's sizes for its four GPUs, and 104.9 ms, at which all of them are taken to end."""


@dataclass(frozen=True, slots=True, eq=False)
class SetUp:
    """Workers with the rule of their paper.

    Attributes:
        what: paper and machines.
        rule: the paper's own, by name.
        paper: the paper's own figure, in its words where it is no plain factor.
        times: of every worker.
        inferred: that the speeds are no more than the least at which the paper's figure can be.
    """

    what: str
    rule: str
    paper: str
    times: AffineTime
    inferred: bool = False

    @property
    def cluster(self) -> Cluster:
        """Its workers, with as many samples as the equal split makes easy."""
        return Cluster(self.times.world_size, PER_WORKER * self.times.world_size)

    @property
    def equal_s(self) -> np.ndarray:
        """What every worker takes at the equal split."""
        return self.times.seconds(np.full(self.times.world_size, PER_WORKER))

    @property
    def bound(self) -> float:
        """sum(X) / (K min X): what balancing can gain at most, with the speeds X of equal sizes."""
        speed = PER_WORKER / self.equal_s
        return float(speed.sum() / (len(speed) * speed.min()))

    @property
    def fastest_alone(self) -> float:
        """What the fastest worker would gain if it took the whole batch by itself."""
        whole = np.full(self.times.world_size, self.cluster.global_batch_size)
        return float(self.equal_s.max() / self.times.seconds(whole).min())


def speeds(*speed: float) -> AffineTime:
    """Return times without fixed costs, in which the equal split takes one second."""
    slope_s = min(speed) / np.array(speed, np.float64) / PER_WORKER
    return AffineTime(np.zeros(len(speed)), slope_s)


def half_faster(gain: float) -> AffineTime:
    """Return four workers, two of them faster by just as much as makes ``gain`` the bound."""
    fast = 2 * gain - 1
    return speeds(fast, fast, 1, 1)


def four_gpus() -> AffineTime:
    """Return the lines through LBB's two splits: 128 samples each, and its balanced sizes."""
    equal_s = np.array([0.0818, 0.0815, 0.0854, 0.3929])
    slope_s = (0.1049 - equal_s) / (BALANCED - PER_WORKER)
    return AffineTime(equal_s - PER_WORKER * slope_s, slope_s)


DYNAMIC = "dynamic-batching"
SETUPS = (
    SetUp("LBB, 2 GTX 1070, M40, GTX 750", "lbb", "3.74", four_gpus()),
    SetUp(
        "Dynamic batching, 9 + 12 + 18 cores",
        DYNAMIC,
        "2 (ResNet)",
        speeds(9, 12, 18),
    ),
    SetUp(
        "Dynamic batching, 2 + 17 + 20 cores",
        DYNAMIC,
        "2.4 (ResNet), up to 4 (MNIST), 1.15 (linear regression)",
        speeds(2, 17, 20),
    ),
    SetUp(
        "Dynamic batching, P100 + Xeon",
        DYNAMIC,
        "more than 4 (ResNet), 1.2 (MNIST)",
        speeds(0.813, 0.187),
    ),
    SetUp("Dynamic batching, 2 T4 + 2 P4", DYNAMIC, "4.5", half_faster(4.5), inferred=True),
    SetUp(
        "OmniLearn, 6 + 6 + 4 + 32 cores",
        DYNAMIC,
        "1.35 on average, 6.7 at most",
        speeds(6, 6, 4, 32),
    ),
    SetUp(
        "LB-BSP 2018, half of 4 workers 3 times as fast",
        "lb-bsp-2018",
        "up to 2",
        half_faster(2),
        inferred=True,
    ),
    SetUp(
        "LB-BSP 2020, half of 4 workers 2.08 times as fast",
        "lb-bsp-2020",
        "up to 54 %, if that is 1.54",
        half_faster(1.54),
        inferred=True,
    ),
    SetUp(
        "LB-BSP 2020, half of 4 workers 3.35 times as fast",
        "lb-bsp-2020",
        "up to 54 % less time, if that is 2.17",
        half_faster(1 / 0.46),
        inferred=True,
    ),
)
