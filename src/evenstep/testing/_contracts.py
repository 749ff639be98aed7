"""The promises that policies and predictors keep, written as test classes to inherit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from .._run._estimates import decode, encode
from .._types import Cluster, Decision, FloatArray, IntArray, Resources, StepTimings
from ..policies import AbstractPolicy
from ..policies._base import check_decision
from ..prediction import AbstractPredictor


class PredictorContract:
    """What every predictor promises.

    Attributes:
        steps_to_settle: steps after which a series that never changed has to be foreseen. Set it
            higher for one that learns slowly.

    Usage:
        class TestMine(PredictorContract):
            @pytest.fixture
            def predictor(self):
                return Mine()
    """

    steps_to_settle = 30

    @pytest.mark.parametrize("seed", range(5))
    def test_forecasts_are_positive(self, predictor: AbstractPredictor[Any], seed: int) -> None:
        """Positive and finite numbers, one for every worker, whatever the values were."""
        values, resources = random_series(seed)
        values = values ** np.random.default_rng(seed).uniform(0.1, 20)

        forecasts = foresee(predictor, values, resources)

        assert forecasts.shape == values.shape
        assert forecasts.dtype == np.float64
        assert (np.isfinite(forecasts) & (forecasts > 0)).all()

    @pytest.mark.parametrize("seed", range(3))
    def test_the_same_series_gives_the_same_forecasts(
        self, predictor: AbstractPredictor[Any], seed: int
    ) -> None:
        """Nothing but the arguments counts: no clock, no random numbers, no memory outside."""
        values, resources = random_series(seed)

        one = foresee(predictor, values, resources)
        other = foresee(predictor, values, resources)

        assert one.tolist() == other.tolist()

    @pytest.mark.parametrize("factor", [1e-3, 7.0])
    def test_units_do_not_matter(self, predictor: AbstractPredictor[Any], factor: float) -> None:
        """Values in other units have forecasts in these units."""
        values, resources = random_series(1)

        one = foresee(predictor, values, resources)
        other = foresee(predictor, factor * values, resources)

        np.testing.assert_allclose(other, factor * one, rtol=1e-6)

    @pytest.mark.parametrize("seed", range(3))
    def test_numbering_does_not_matter(self, predictor: AbstractPredictor[Any], seed: int) -> None:
        """Renumbered workers keep their forecasts."""
        values, resources = random_series(seed)
        order = np.random.default_rng(seed).permutation(values.shape[1])

        one = foresee(predictor, values, resources)
        other = foresee(predictor, values[:, order], [pick(each, order) for each in resources])

        np.testing.assert_allclose(other, one[:, order], rtol=1e-9)

    @pytest.mark.parametrize("world_size", [2, 1000])
    def test_workers_do_not_see_each_other(
        self, predictor: AbstractPredictor[Any], world_size: int
    ) -> None:
        """A worker by itself has the forecasts that it has among a thousand."""
        values, resources = random_series(2, num_steps=20, world_size=world_size)
        last = np.array([world_size - 1])

        among = foresee(predictor, values, resources)
        alone = foresee(predictor, values[:, last], [pick(each, last) for each in resources])

        np.testing.assert_allclose(alone, among[:, last], rtol=1e-9)

    def test_a_worker_that_was_not_measured_keeps_its_forecast(
        self, predictor: AbstractPredictor[Any]
    ) -> None:
        """NaN until its first value; then a step without one changes nothing, bit for bit."""
        values, resources = random_series(3)
        gaps = np.random.default_rng(3).random(values.shape) < 0.3
        gaps[:10, 0], gaps[0, 1:] = True, False

        forecasts = foresee(predictor, np.where(gaps, np.nan, values), resources)

        assert np.isnan(forecasts[:10, 0]).all()
        assert np.isfinite(forecasts[10:, 1:]).all()
        kept = gaps[1:, 1:]
        assert (forecasts[1:, 1:][kept] == forecasts[:-1, 1:][kept]).all()

    def test_gaps_of_one_worker_are_nothing_to_another(
        self, predictor: AbstractPredictor[Any]
    ) -> None:
        """The others' forecasts are the same as without them."""
        values, resources = random_series(4)
        gaps = values.copy()
        gaps[::3, 1] = np.nan

        whole = np.delete(foresee(predictor, values, resources), 1, axis=1)
        others = np.delete(foresee(predictor, gaps, resources), 1, axis=1)

        assert others.tolist() == whole.tolist()

    @pytest.mark.parametrize("resources_known", [True, False])
    def test_a_constant_is_learnt(
        self, predictor: AbstractPredictor[Any], resources_known: bool
    ) -> None:
        """To a tenth of a percent, from a millionth to a million, and it stays learnt."""
        constant = 10.0 ** np.arange(-6, 7)
        values = np.tile(constant, (self.steps_to_settle + 100, 1))
        _, resources = random_series(5, num_steps=len(values), world_size=len(constant))

        forecasts = foresee(predictor, values, resources if resources_known else None)

        settled = forecasts[self.steps_to_settle :]
        np.testing.assert_allclose(settled, values[self.steps_to_settle :], rtol=1e-3)

    def test_resources_may_be_missing(self, predictor: AbstractPredictor[Any]) -> None:
        """Always, at first, or now and then."""
        values, resources = random_series(6)
        now_and_then: list[Resources | None] = list(resources)
        now_and_then[:10], now_and_then[20] = [None] * 10, None

        for known in (None, now_and_then):
            forecasts = foresee(predictor, values, known)

            assert (np.isfinite(forecasts) & (forecasts > 0)).all()

    def test_arguments_are_left_alone(self, predictor: AbstractPredictor[Any]) -> None:
        """Two updates from one state give the same, and what was predicted is the caller's own."""
        values, resources = random_series(7)
        state = state_after(predictor, values, resources)
        before = encode(state)

        first = predictor.update(state, values[0], resources[0])
        predictor.predict(state)[:] = -1.0
        second = predictor.update(state, values[0], resources[0])

        assert encode(state) == before
        assert encode(first) == encode(second)

    @pytest.mark.parametrize("num_steps", [0, 1, 60])
    def test_resuming_changes_nothing(
        self, predictor: AbstractPredictor[Any], num_steps: int
    ) -> None:
        """The state fits any checkpoint, and a run that reads it back continues as if never ended.

        Plain values without a NaN, by which a damaged checkpoint is known.
        """
        values, resources = random_series(8, num_steps=num_steps + 20)
        values[num_steps // 2 : num_steps, 0] = np.nan
        state = state_after(predictor, values[:num_steps], resources)
        resumed = decode(encode(state))  # raises at the first value that is not plain

        assert "nan" not in str(encode(state))

        for row, given in zip(values[num_steps:], resources[num_steps:], strict=True):
            state = predictor.update(state, row, given)
            resumed = predictor.update(resumed, row, given)

            assert predictor.predict(resumed).tolist() == predictor.predict(state).tolist()


def random_series(
    seed: int, *, num_steps: int = 60, world_size: int = 5
) -> tuple[FloatArray, list[Resources]]:
    """Return values that wander, jump and jitter, and resources that explain some of it.

    The values are ``(num_steps, world_size)``, the resources what is known after each step.
    """
    rng = np.random.default_rng(seed)
    shape = (num_steps + 1, world_size)
    free = np.clip(0.5 + np.cumsum(0.1 * rng.standard_normal(shape), axis=0), 0.0, 1.0)
    jumps = np.cumsum(rng.standard_normal(shape) * (rng.random(shape) < 0.03), axis=0)
    speed = rng.lognormal(3, 1, world_size) * np.exp(jumps + 0.05 * rng.standard_normal(shape))
    values = speed * (0.2 + 0.8 * free)
    resources = [Resources(cpu, (1e10 * cpu).astype(np.int64)) for cpu in free[1:]]
    return values[:-1], resources


def pick(resources: Resources, order: Any) -> Resources:
    """Return what these workers have to spare."""
    return Resources(resources.free_cpu[order], resources.free_memory_bytes[order])


def state_after(
    predictor: AbstractPredictor[Any], values: FloatArray, resources: list[Resources]
) -> Any:
    """Return the state after these steps."""
    state = predictor.init(values.shape[1])
    for row, given in zip(values, resources, strict=False):
        state = predictor.update(state, row, given)
    return state


def foresee(
    predictor: AbstractPredictor[Any],
    values: FloatArray,
    resources: list[Any] | None,
) -> FloatArray:
    """Return the forecast after every step, ``(num_steps, world_size)``.

    Any floating-point fault raises: a driver that shows a policy steps which never were, as after
    a restart, takes one for a sign that the policy is lost.
    """
    state = predictor.init(values.shape[1])
    given = [None] * len(values) if resources is None else resources
    forecasts = []
    with np.errstate(all="raise"):
        for row, spare in zip(values, given, strict=True):
            row = row.copy()
            row.flags.writeable = False  # a predictor that edits its inputs fails here
            state = predictor.update(state, row, spare)
            forecasts.append(predictor.predict(state))
    return np.array(forecasts)


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
