"""The promises a policy keeps, written as test classes to inherit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from .._run._estimates import decode, encode
from .._types import Cluster, Decision, FloatArray, IntArray, StepTimings
from ..policies import AbstractPolicy
from ..policies._base import check_decision


class PolicyContract:
    """What every policy promises, adaptive or not: one test for each promise.

    A promise that is broken fails with one line that says by what, and with which seed.

    Attributes:
        granule: samples that the policy itself keeps together, beyond what the cluster asks for.

    Usage:
        class TestMine(PolicyContract):
            @pytest.fixture
            def policy(self):
                return Mine()
    """

    granule = 1

    def test_batch_sizes_are_feasible(self, policy: AbstractPolicy[Any]) -> None:
        """Integers that add up to B, within bounds, in whole granules on all workers but one."""
        for seed in range(50):
            cluster, seconds_per_sample = random_cluster(seed)
            decision = drive(policy, cluster, seconds_per_sample, policy.init(cluster), 3)
            feasible(policy, decision, cluster, f"seed {seed}")

    def test_a_guess_is_feasible_too(self, policy: AbstractPolicy[Any]) -> None:
        """By the first step of a run, if there is one; and so is what follows it."""
        for seed in range(50):
            cluster, seconds_per_sample = random_cluster(seed)
            start = policy.init(cluster)
            if start.batch_size.all():
                first = timed(start.batch_size, 100 * seconds_per_sample)
                guess = policy.guess(cluster, first, start.state) or start
                feasible(policy, guess, cluster, f"seed {seed}, by the first step")
                after = drive(policy, cluster, seconds_per_sample, guess, 2)
                feasible(policy, after, cluster, f"seed {seed}, after a guess")

    def test_numbering_does_not_matter(self, policy: AbstractPolicy[Any]) -> None:
        """Renumbered workers keep their batch sizes, up to ties, worth one granule."""
        for seed in range(20):
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
            keeps(
                (abs(other.batch_size - one.batch_size[order]) <= tie).all(),
                f"seed {seed}: workers that got {one.batch_size[order].tolist()} get "
                f"{other.batch_size.tolist()} under other numbers",
            )

    @pytest.mark.parametrize("granularity", [1, 4])
    def test_ties_go_to_the_lower_rank(self, policy: AbstractPolicy[Any], granularity: int) -> None:
        """Equal workers differ by one granule at most, and the lower rank has the larger batch."""
        cluster = Cluster(3, 101, granularity=granularity)
        sizes = drive(policy, cluster, np.full(3, 0.07), policy.init(cluster), 10).batch_size
        keeps(
            (np.diff(sizes) <= 0).all() and sizes[0] - sizes[-1] <= max(granularity, self.granule),
            f"equal workers get {sizes.tolist()} in granules of {granularity}",
        )

    def test_equal_workers_stay_equal(self, policy: AbstractPolicy[Any]) -> None:
        """Without noise, and for as long as one likes: they differ by one granule at most."""
        cluster = Cluster(8, 1003)
        decision = policy.init(cluster)
        for num_steps in range(10, 201, 10):
            decision = drive(policy, cluster, np.full(8, 0.003), decision, 10)
            keeps(
                np.ptp(decision.batch_size) <= self.granule,
                f"after {num_steps} steps equal workers get {decision.batch_size.tolist()}",
            )

    def test_the_same_timings_give_the_same_decisions(self, policy: AbstractPolicy[Any]) -> None:
        """Nothing but the arguments counts: no clock, no random numbers, no memory outside."""
        for seed in range(10):
            cluster, seconds_per_sample = random_cluster(seed)
            one = drive(policy, cluster, seconds_per_sample, policy.init(cluster), 5)
            other = drive(policy, cluster, seconds_per_sample, policy.init(cluster), 5)
            same(one, other, f"seed {seed}: the same timings twice")
            keeps(
                encode(one.state) == encode(other.state),
                f"seed {seed}: the same timings twice give two states",
            )

    def test_bounds_that_tighten_are_kept(self, policy: AbstractPolicy[Any]) -> None:
        """A batch that was allowed before is cut, as when it turns out not to fit in memory."""
        for seed in range(20):
            rng = np.random.default_rng(seed)
            seconds_per_sample = rng.lognormal(-4, 1, 4)
            free = Cluster(4, 128)
            before = drive(policy, free, seconds_per_sample, policy.init(free), 3)
            tight = Cluster(4, 128, max_batch_size=rng.integers(32, 40, 4))
            after = drive(policy, tight, seconds_per_sample, before, 1)
            feasible(policy, after, tight, f"seed {seed}, bounds that tighten")

    def test_steps_of_other_sizes_do_no_harm(self, policy: AbstractPolicy[Any]) -> None:
        """A short last batch, or sizes that a wrapper kept, leave the next decision feasible."""
        cluster, seconds_per_sample = Cluster(3, 96), np.array([0.01, 0.02, 0.04])
        decision = policy.init(cluster)
        for ran in ([5, 4, 2], [40, 30, 26], [40, 30, 26], [40, 30, 26], [1, 0, 0], [40, 30, 26]):
            timings = timed(np.array(ran), seconds_per_sample)
            decision = policy.update(cluster, timings, decision.state)
            feasible(policy, decision, cluster, f"after a step of {ran}")

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
            keeps(
                decisions[-1] == decisions[0],
                f"a time of {nothing} of a worker without samples leads to {decisions[-1]}, one of "
                f"nan to {decisions[0]}",
            )

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
        feasible(policy, after, cluster, f"after a time of {broken}")

    def test_a_level_step_leaves_the_sizes(self, policy: AbstractPolicy[Any]) -> None:
        """As promised by ``Decision.level``: whatever came before, and whichever rank was first."""
        for seed in range(30):
            rng = np.random.default_rng(seed)
            cluster = Cluster(int(rng.integers(2, 6)), int(rng.integers(40, 200)))
            slopes_s, noise = rng.lognormal(-4, rng.choice([0.02, 1.0]), cluster.world_size), 0.03
            decision = policy.init(cluster)
            for step in range(40):
                luck = rng.lognormal(0, noise, cluster.world_size)
                steady = timed(decision.batch_size, luck * (slopes_s if step > 20 else 0.01))
                ended_s = rng.uniform(1 - min(decision.level, 0.99), 1, cluster.world_size)
                level = timed(decision.batch_size, 1 / decision.batch_size * ended_s / max(ended_s))
                if decision.level > 0 and level.apart <= decision.level:
                    kept = policy.update(cluster, level, decision.state)
                    keeps(
                        kept.batch_size.tolist() == decision.batch_size.tolist(),
                        f"seed {seed}, step {step}: with `Decision(level={decision.level:.3g})` a "
                        f"step that ends {level.apart:.1%} apart has to leave the sizes, and makes "
                        f"{kept.batch_size.tolist()} of {decision.batch_size.tolist()}",
                    )
                decision = policy.update(cluster, steady, decision.state)

    @pytest.mark.parametrize("num_steps", [0, 1, 3])
    def test_decisions_are_plain(self, policy: AbstractPolicy[Any], num_steps: int) -> None:
        """The state fits any checkpoint, and the reason says something."""
        cluster, seconds_per_sample = random_cluster(num_steps)
        decision = drive(policy, cluster, seconds_per_sample, policy.init(cluster), num_steps)
        try:
            encode(decision.state)
        except ValueError as error:
            pytest.fail(str(error), pytrace=False)
        reason = decision.reason
        keeps(isinstance(reason, str) and bool(reason.strip()), f"the reason is {reason!r}")

    def test_resuming_changes_nothing(self, policy: AbstractPolicy[Any]) -> None:
        """A run resumed from a written state, even twice, continues as if never stopped."""
        for seed in range(10):
            cluster, seconds_per_sample = random_cluster(seed)
            halfway = drive(policy, cluster, seconds_per_sample, policy.init(cluster), 3)
            resumed = replace(halfway, state=decode(encode(halfway.state)))
            unbroken = drive(policy, cluster, seconds_per_sample, halfway, 3)
            for which in ("a", "a second"):
                again = drive(policy, cluster, seconds_per_sample, resumed, 3)
                same(unbroken, again, f"seed {seed}: {which} run from a written state")


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
        sizes = settled.batch_size.tolist()
        keeps(abs(settled.batch_size - [64, 32]).max() <= 1, f"{sizes} after {num_steps} steps")

    def test_recovered_straggler_gets_its_share_back(self, policy: AbstractPolicy[Any]) -> None:
        """Slow for a while is not slow forever."""
        num_steps = self.steps_to_settle

        slowed = drive(policy, PAIR, np.array([0.01, 1.0]), policy.init(PAIR), num_steps)
        recovered = drive(policy, PAIR, np.array([0.01, 0.01]), slowed, num_steps)
        sizes = slowed.batch_size.tolist()
        keeps(sizes[1] < 10, f"{sizes} after {num_steps} steps at speeds of 100 to 1")
        sizes = recovered.batch_size.tolist()
        keeps(abs(recovered.batch_size - 48).max() <= 1, f"{sizes} {num_steps} equal steps later")


PAIR = Cluster(2, 96)


def keeps(promise: bool | np.bool_, problem: str) -> None:
    """Fail with one line unless a promise is kept."""
    if not promise:
        pytest.fail(problem, pytrace=False)


def feasible(
    policy: AbstractPolicy[Any], decision: Decision[Any], cluster: Cluster, where: str
) -> None:
    """Fail with one line unless the sizes can be run in this cluster."""
    try:
        check_decision(decision, cluster, name=type(policy).__name__)
    except (TypeError, ValueError) as error:
        pytest.fail(f"{where}: {error}", pytrace=False)


def same(one: Decision[Any], other: Decision[Any], what: str) -> None:
    """Fail with one line unless two decisions and their reasons are the same."""
    ours, theirs = one.batch_size.tolist(), other.batch_size.tolist()
    keeps(ours == theirs, f"{what} gives {theirs} instead of {ours}")
    keeps(one.reason == other.reason, f"{what} gives {other.reason!r} instead of {one.reason!r}")


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
    """Return the timings of a step without fixed costs, in which no worker waited for input."""
    return StepTimings(
        batch_size.copy(), batch_size * seconds_per_sample, data_s=np.zeros(len(batch_size))
    )
