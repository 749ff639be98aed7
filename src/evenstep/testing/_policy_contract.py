"""The promises a policy keeps, written as test classes to inherit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from .._types import Cluster, Decision, FloatArray, IntArray, StepTimings
from ..policies import AbstractPolicy
from ._plain import decode, encode


class PolicyContract:
    """What every policy promises, adaptive or not.

    Attributes:
        granule: samples that the policy itself keeps together, beyond what the cluster asks for.

    Usage:
        class TestMine(PolicyContract):
            @pytest.fixture
            def policy(self):
                return Mine()
    """

    granule = 1

    @pytest.mark.parametrize("seed", range(50))
    def test_batch_sizes_are_feasible(self, policy: AbstractPolicy[Any], seed: int) -> None:
        """Integers that add up to B, within bounds, in whole granules on all workers but one."""
        cluster, seconds_per_sample = random_cluster(seed)

        batch_size = drive(policy, cluster, seconds_per_sample, policy.init(cluster), 3).batch_size

        assert np.issubdtype(batch_size.dtype, np.integer)
        assert batch_size.sum() == cluster.global_batch_size
        assert (cluster.min_batch_size <= batch_size).all()
        assert (batch_size <= cluster.max_batch_size).all()
        assert np.count_nonzero(batch_size % cluster.granularity) <= 1

    @pytest.mark.parametrize("seed", range(20))
    def test_numbering_does_not_matter(self, policy: AbstractPolicy[Any], seed: int) -> None:
        """Renumbered workers keep their batch sizes, up to ties, worth one granule."""
        cluster, seconds_per_sample = random_cluster(seed, min_granules=1)
        order = np.random.default_rng(seed).permutation(cluster.world_size)
        renumbered = replace(
            cluster,
            min_batch_size=cluster.min_batch_size[order],
            max_batch_size=cluster.max_batch_size[order],
            granularity=cluster.granularity[order],
        )

        one = drive(policy, cluster, seconds_per_sample, policy.init(cluster), 3)
        other = drive(policy, renumbered, seconds_per_sample[order], policy.init(renumbered), 3)

        tie = np.maximum(renumbered.granularity, self.granule)
        assert (abs(other.batch_size - one.batch_size[order]) <= tie).all()

    @pytest.mark.parametrize("granularity", [1, 4])
    def test_ties_go_to_the_lower_rank(self, policy: AbstractPolicy[Any], granularity: int) -> None:
        """Equal workers differ by one granule at most, and the lower rank has the larger batch."""
        cluster = Cluster(3, 101, granularity=granularity)

        batch_size = drive(policy, cluster, np.full(3, 0.07), policy.init(cluster), 10).batch_size

        assert (np.diff(batch_size) <= 0).all()
        assert batch_size[0] - batch_size[-1] <= max(granularity, self.granule)

    def test_equal_workers_stay_equal(self, policy: AbstractPolicy[Any]) -> None:
        """Without noise, and for as long as one likes: they differ by one granule at most."""
        cluster = Cluster(8, 1003)
        decision = policy.init(cluster)
        for _ in range(20):
            decision = drive(policy, cluster, np.full(8, 0.003), decision, 10)

            assert np.ptp(decision.batch_size) <= self.granule

    @pytest.mark.parametrize("seed", range(10))
    def test_the_same_timings_give_the_same_decisions(
        self, policy: AbstractPolicy[Any], seed: int
    ) -> None:
        """Nothing but the arguments counts: no clock, no random numbers, no memory outside."""
        cluster, seconds_per_sample = random_cluster(seed)

        one = drive(policy, cluster, seconds_per_sample, policy.init(cluster), 5)
        other = drive(policy, cluster, seconds_per_sample, policy.init(cluster), 5)

        assert one.batch_size.tolist() == other.batch_size.tolist()
        assert one.reason == other.reason
        assert encode(one.state) == encode(other.state)

    @pytest.mark.parametrize("seed", range(20))
    def test_bounds_that_tighten_are_kept(self, policy: AbstractPolicy[Any], seed: int) -> None:
        """A batch that was allowed before is cut, as when it turns out not to fit in memory."""
        rng = np.random.default_rng(seed)
        seconds_per_sample = rng.lognormal(-4, 1, 4)
        free = Cluster(4, 128)
        before = drive(policy, free, seconds_per_sample, policy.init(free), 3)
        tight = Cluster(4, 128, max_batch_size=rng.integers(32, 40, 4))

        batch_size = drive(policy, tight, seconds_per_sample, before, 1).batch_size

        assert batch_size.sum() == 128
        assert (batch_size <= tight.max_batch_size).all()

    def test_steps_of_other_sizes_do_no_harm(self, policy: AbstractPolicy[Any]) -> None:
        """A short last batch, or sizes that a wrapper kept, leave the next decision feasible."""
        cluster, seconds_per_sample = Cluster(3, 96), np.array([0.01, 0.02, 0.04])
        decision = policy.init(cluster)
        for ran in ([5, 4, 2], [40, 30, 26], [40, 30, 26], [40, 30, 26], [1, 0, 0], [40, 30, 26]):
            timings = timed(np.array(ran), seconds_per_sample)
            decision = policy.update(cluster, timings, decision.state)

            assert decision.batch_size.sum() == 96
            assert (decision.batch_size >= 1).all()

    def test_a_worker_without_samples_is_left_out(self, policy: AbstractPolicy[Any]) -> None:
        """Its time means nothing, be it NaN, and never reaches a decision or the state."""
        cluster, ran = Cluster(3, 96), np.array([48, 48, 0])
        decisions = []
        for nothing in (np.nan, 0.0, -1.0, np.inf, 7.0):
            decision = policy.init(cluster)
            for _ in range(5):
                compute_s = np.array([0.5, 0.6, nothing])
                timings = StepTimings(ran, compute_s, data_s=np.zeros(3))
                decision = policy.update(cluster, timings, decision.state)
            decisions.append((decision.batch_size.tolist(), str(encode(decision.state))))

        assert decisions == decisions[:1] * 5

    @pytest.mark.parametrize("broken", [np.nan, 0.0, -1.0, np.inf])
    def test_a_time_that_cannot_be_is_refused(
        self, policy: AbstractPolicy[Any], broken: float
    ) -> None:
        """With the rank in the message, before the policy sees it; the state it has stays good."""
        cluster, seconds_per_sample = Cluster(2, 96), np.array([0.01, 0.02])
        before = drive(policy, cluster, seconds_per_sample, policy.init(cluster), 2)
        with pytest.raises(ValueError, match=r"StepTimings\(compute_s=.*on rank 1"):
            timed(before.batch_size, np.array([0.01, broken]))

        after = drive(policy, cluster, seconds_per_sample, before, 2)

        assert after.batch_size.sum() == 96

    @pytest.mark.parametrize("seed", range(30))
    def test_a_level_step_leaves_the_sizes(self, policy: AbstractPolicy[Any], seed: int) -> None:
        """As promised by ``Decision.level``: whatever came before, and whoever was first."""
        rng = np.random.default_rng(seed)
        cluster = Cluster(int(rng.integers(2, 6)), int(rng.integers(40, 200)))
        slopes_s, noise = rng.lognormal(-4, rng.choice([0.02, 1.0]), cluster.world_size), 0.03
        decision = policy.init(cluster)
        for step in range(40):
            luck = rng.lognormal(0, noise, cluster.world_size) * (slopes_s if step > 20 else 0.01)
            steady = timed(decision.batch_size, luck)
            ended_s = rng.uniform(1 - min(decision.level, 0.99), 1, cluster.world_size)
            level = timed(decision.batch_size, 1 / decision.batch_size * ended_s / ended_s.max())
            if decision.level > 0 and level.apart <= decision.level:
                kept = policy.update(cluster, level, decision.state)

                assert kept.batch_size.tolist() == decision.batch_size.tolist(), kept.reason
            decision = policy.update(cluster, steady, decision.state)

    @pytest.mark.parametrize("num_steps", [0, 1, 3])
    def test_decisions_are_plain(self, policy: AbstractPolicy[Any], num_steps: int) -> None:
        """The state fits any checkpoint, and the reason says something."""
        cluster, seconds_per_sample = random_cluster(num_steps)

        decision = drive(policy, cluster, seconds_per_sample, policy.init(cluster), num_steps)

        encode(decision.state)  # raises at the first value that is not plain
        assert isinstance(decision.reason, str)
        assert decision.reason.strip()

    @pytest.mark.parametrize("seed", range(10))
    def test_resuming_changes_nothing(self, policy: AbstractPolicy[Any], seed: int) -> None:
        """A run resumed from a written state, even twice, continues as if never stopped."""
        cluster, seconds_per_sample = random_cluster(seed)

        halfway = drive(policy, cluster, seconds_per_sample, policy.init(cluster), 3)
        resumed = replace(halfway, state=decode(encode(halfway.state)))
        unbroken = drive(policy, cluster, seconds_per_sample, halfway, 3)
        once = drive(policy, cluster, seconds_per_sample, resumed, 3)
        again = drive(policy, cluster, seconds_per_sample, resumed, 3)

        assert unbroken.batch_size.tolist() == once.batch_size.tolist() == again.batch_size.tolist()
        assert unbroken.reason == once.reason == again.reason


class AdaptivePolicyContract:
    """What a policy that reacts to timings promises as well.

    Attributes:
        steps_to_settle: steps after which a policy has to be where it wants to be. Set it higher
            for one that moves a few samples at a time.
    """

    steps_to_settle = 50

    def test_twice_as_fast_gets_twice_the_samples(self, policy: AbstractPolicy[Any]) -> None:
        """Within one sample, on two workers without bounds in the way."""
        num_steps = self.steps_to_settle

        settled = drive(policy, PAIR, np.array([0.01, 0.02]), policy.init(PAIR), num_steps)

        assert abs(settled.batch_size - [64, 32]).max() <= 1

    def test_recovered_straggler_gets_its_share_back(self, policy: AbstractPolicy[Any]) -> None:
        """Slow for a while is not slow forever."""
        num_steps = self.steps_to_settle

        slowed = drive(policy, PAIR, np.array([0.01, 1.0]), policy.init(PAIR), num_steps)
        recovered = drive(policy, PAIR, np.array([0.01, 0.01]), slowed, num_steps)

        assert slowed.batch_size[1] < 10
        assert abs(recovered.batch_size - 48).max() <= 1


PAIR = Cluster(2, 96)


def random_cluster(seed: int, *, min_granules: int = 0) -> tuple[Cluster, FloatArray]:
    """Return 1 to 9 workers with random bounds, and the seconds each needs per sample."""
    rng = np.random.default_rng(seed)
    world_size = int(rng.integers(1, 10))
    granule: IntArray = rng.choice([1, 1, 2, 8], world_size)
    lo = granule * rng.integers(min_granules, 4, world_size)
    hi = lo + granule * rng.integers(1, 30, world_size)
    cluster = Cluster(
        world_size,
        int(rng.integers(max(1, lo.sum()), hi.sum() + 1)),
        min_batch_size=lo,
        max_batch_size=hi,
        granularity=granule,
    )
    return cluster, rng.lognormal(-4, 2, world_size)


def drive(
    policy: AbstractPolicy[Any],
    cluster: Cluster,
    seconds_per_sample: FloatArray,
    start: Decision[Any],
    num_steps: int,
) -> Decision[Any]:
    """Run ``num_steps`` updates from ``start`` with step time proportional to batch size."""
    decision = start
    for _ in range(num_steps):
        timings = timed(decision.batch_size, seconds_per_sample)
        for measured in (timings.batch_size, timings.compute_s, timings.data_s):
            measured.flags.writeable = False  # a policy that edits its inputs fails here
        decision = policy.update(cluster, timings, decision.state)
    return decision


def timed(batch_size: IntArray, seconds_per_sample: FloatArray) -> StepTimings:
    """Return the timings of a step without fixed costs, in which nobody waited for input."""
    return StepTimings(
        batch_size.copy(), batch_size * seconds_per_sample, data_s=np.zeros(len(batch_size))
    )
