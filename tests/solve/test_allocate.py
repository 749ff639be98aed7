"""The solver's split is the best there is, and whole numbers add up the same way every time."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import AffineTime, Cluster, allocate, apportion
from evenstep.solve._allocate import cut, ends_within, in_proportion, makespan_s, scaled
from evenstep.timemodels import AbstractTimeModel, bisect_batch

from ..tables import TableTime
from .split_reference import (
    KINDS,
    by_enumeration,
    by_integer_program,
    by_table,
    keeps_the_rules,
    problem,
)


def largest_total_below(times, cluster, budget_s):
    """Return how many samples fit strictly below a time, by counting size after size."""
    most = np.array(
        [
            max(
                b
                for b in range(lo, hi + 1)
                if b == lo or times.seconds(np.full(n, b))[rank] < budget_s
            )
            for n in [cluster.world_size]
            for rank, (lo, hi) in enumerate(
                zip(cluster.min_batch_size, cluster.max_batch_size, strict=True)
            )
        ]
    )
    part = most % cluster.granularity
    return (most - part).sum() + part.max()


class Counted(AbstractTimeModel):
    """A model that counts how often it is inverted."""

    def __init__(self, inner):
        self.inner, self.num_calls = inner, 0

    @property
    def world_size(self):
        return self.inner.world_size

    def seconds(self, batch_size):
        return self.inner.seconds(batch_size)

    def largest_batch(self, budget_s, most):
        self.num_calls += 1
        return self.inner.largest_batch(budget_s, most)


class Quadratic(AbstractTimeModel):
    """A user's model, without a closed form of its own."""

    world_size = 3

    def seconds(self, batch_size):
        return np.array([1.0, 2.0, 4.0]) * batch_size**2

    def largest_batch(self, budget_s, most):
        return bisect_batch(self.seconds, budget_s, most=most)


@pytest.mark.parametrize("kind", KINDS)
def test_no_split_is_faster_by_exhaustive_search(kind):
    """Over every split of up to ten samples on up to three workers, to the last bit."""
    for seed in range(100):
        times, cluster = problem(kind, seed, most_workers=3, most_samples=10)

        assert makespan_s(times, allocate(times, cluster)) == by_enumeration(times, cluster), seed


@pytest.mark.parametrize("kind", KINDS)
def test_no_split_is_faster_by_dynamic_programming(kind):
    """Larger problems: bounds, granularity, zero shares, ties and plateaus, to the last bit."""
    for seed in range(200):
        times, cluster = problem(kind, seed)
        split = allocate(times, cluster)

        assert keeps_the_rules(split, cluster), seed
        assert makespan_s(times, split) == by_table(times, cluster), seed


@pytest.mark.parametrize("kind", KINDS)
def test_no_split_is_faster_by_an_integer_program(kind):
    """A solver that shares no line with ours agrees, to its own tolerance."""
    for seed in range(15):
        times, cluster = problem(kind, seed)
        expected = by_integer_program(times, cluster)

        assert makespan_s(times, allocate(times, cluster)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_whether_any_split_ends_in_time_is_told_exactly(kind):
    """Yes at the time of the best split and after it, no at the float before."""
    for seed in range(200):
        times, cluster = problem(kind, seed)
        best_s = makespan_s(times, allocate(times, cluster))

        assert ends_within(times, cluster, best_s), seed
        assert ends_within(times, cluster, 2 * best_s + 1), seed
        assert not ends_within(times, cluster, np.nextafter(best_s, -np.inf)), seed


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 300), st.integers(1, 16))
def test_nothing_is_left_to_gain_on_larger_clusters(seed, world_size, extra, coarsest):
    """Strictly below the makespan the workers cannot hold the global batch."""
    random = np.random.default_rng(seed)
    granularity = random.integers(1, coarsest + 1, world_size)
    times = AffineTime(random.uniform(0, 9, world_size), random.uniform(0, 1, world_size))
    cluster = Cluster(
        world_size,
        int(granularity.sum()) + extra,
        random.integers(0, 2, world_size),
        None,
        granularity,
    )
    split = allocate(times, cluster)
    slowest_s = makespan_s(times, split)
    forced_s = makespan_s(times, cluster.min_batch_size)

    assert keeps_the_rules(split, cluster)
    assert (
        slowest_s == forced_s
        or largest_total_below(times, cluster, slowest_s) < cluster.global_batch_size
    )


def test_the_closed_form_of_the_dynamic_batching_paper_is_met():
    """t = 5 + c b with c = (1, 1, 5) and 96 samples: 43.6, 43.6 and 8.7, in whole samples."""
    split = allocate(AffineTime(np.full(3, 5.0), np.array([1.0, 1.0, 5.0])), Cluster(3, 96))

    assert abs(split - [43.64, 43.64, 8.73]).max() < 1


@given(
    st.integers(1, 40),
    st.integers(0, 400),
    st.integers(1, 8),
    st.sampled_from([(0.0, 1.0), (3.0, 0.1), (2.0, 0.0), (0.0, 0.0)]),
)
def test_equal_workers_get_equal_shares(world_size, extra, granule, costs):
    """They differ by a granule at most, the lower rank first, plateaus included."""
    cluster = Cluster(world_size, world_size * granule + extra, granularity=granule)
    times = AffineTime(*(np.full(world_size, cost) for cost in costs))
    split = allocate(times, cluster)

    assert np.ptp(split) <= granule
    assert (np.diff(split) <= 0).all()


def test_equal_workers_stay_equal_on_a_staircase():
    """Any split within the same stair costs the same; the even one is returned."""
    stairs = np.ceil(np.arange(65) / 32)
    split = allocate(TableTime(np.stack([stairs] * 4)), Cluster(4, 90, max_batch_size=64))

    assert split.tolist() == [23, 23, 22, 22]


@given(st.integers(0, 2**32), st.permutations(range(6)))
def test_renumbering_the_workers_renumbers_the_split(seed, order):
    """Where no two times tie, the answer belongs to the worker and not to its rank."""
    random = np.random.default_rng(seed)
    intercept_s, slope_s = random.uniform(0, 9, 6), random.uniform(0.1, 1, 6)
    granularity = random.integers(1, 4, 6)
    split = allocate(AffineTime(intercept_s, slope_s), Cluster(6, 96, 1, None, granularity))
    renumbered = allocate(
        AffineTime(intercept_s[order], slope_s[order]), Cluster(6, 96, 1, None, granularity[order])
    )

    assert renumbered.tolist() == split[order].tolist()


def test_a_worker_pinned_by_its_bound_leaves_the_others_balanced():
    """Rank 0 takes 100 s whatever is decided; the others still share out evenly."""
    times = AffineTime(np.zeros(3), np.array([50.0, 1.0, 1.0]))
    split = allocate(times, Cluster(3, 22, min_batch_size=np.array([2, 0, 0])))

    assert split.tolist() == [2, 10, 10]


@pytest.mark.parametrize(("least", "expected"), [(0, [0, 10, 10]), (1, [1, 10, 9])])
def test_a_costly_worker_sits_out_only_where_the_bound_lets_it(least, expected):
    """Its fixed cost of 30 s is past what the others need for all."""
    times = AffineTime(np.array([30.0, 0.0, 0.0]), np.ones(3))

    assert allocate(times, Cluster(3, 20, least)).tolist() == expected


def test_the_remainder_goes_where_it_finishes_first():
    """Two samples past whole granules of four: to the fast worker, the others are full."""
    times = AffineTime(np.zeros(3), np.array([2.0, 1.0, 2.0]))
    split = allocate(times, Cluster(3, 18, granularity=4))

    assert split.tolist() == [4, 10, 4]


@pytest.mark.parametrize(
    ("intercept_s", "slope_s"),
    [(1e9, 1e-12), (0.0, 1e-300), (1e-300, 1e-300), (1e150, 1e140), (0.1, 5e-324)],
)
def test_costs_of_any_size_are_met_exactly(intercept_s, slope_s):
    """Also where the slope drowns in the intercept's last bit, or is denormal."""
    times = AffineTime(np.array([intercept_s, 0.0]), np.array([slope_s, slope_s]))
    cluster = Cluster(2, 40, 0)

    assert makespan_s(times, allocate(times, cluster)) == by_table(times, cluster)


def test_a_users_own_model_is_solved_exactly():
    """A subclass of `AbstractTimeModel` is all it takes."""
    times, cluster = Quadratic(), Cluster(3, 40)

    assert makespan_s(times, allocate(times, cluster)) == by_table(times, cluster)


@pytest.mark.parametrize(("world_size", "most"), [(8, 12), (1000, 16), (10_000, 20)])
def test_straight_lines_take_few_probes(world_size, most):
    """What a decision costs, counted instead of clocked."""
    for seed in range(5):
        random = np.random.default_rng(seed)
        slope_s = 1e-3 * np.exp(random.uniform(0, np.log(4), world_size))
        times = Counted(AffineTime(random.uniform(2e-3, 2e-2, world_size), slope_s))
        allocate(times, Cluster(world_size, 64 * world_size))

        assert times.num_calls <= most, seed


def test_stairs_take_a_number_of_probes_that_a_bisection_would():
    """Chords mislead there; halving the bracket bounds the search."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        stairs = random.uniform(0.1, 9, (8, 17)).cumsum(axis=1).repeat(32, axis=1)
        stairs[:, 0] = 0
        times = Counted(TableTime(stairs))
        allocate(times, Cluster(8, 512))

        assert times.num_calls <= 60, seed


def test_curves_that_level_off_take_no_more():
    """A steep start under a shallow chord: steps along the chord alone would creep."""
    sizes = np.arange(6401)
    curve = np.minimum(sizes, 150) + 1e-3 * sizes
    times = Counted(TableTime(np.stack([curve] * 64)))
    allocate(times, Cluster(64, 6400))

    assert times.num_calls <= 60


def test_inputs_are_left_alone_and_the_answer_is_the_callers_own():
    """The returned array is new and may be written to, also where bounds leave no choice."""
    cluster = Cluster(2, 8, min_batch_size=4)
    split = allocate(AffineTime(np.ones(2), np.ones(2)), cluster)
    split += 1

    assert cluster.min_batch_size.tolist() == [4, 4]


def test_times_of_another_cluster_are_refused():
    """The message says how many workers there are and how many were described."""
    with pytest.raises(ValueError, match=r"`allocate\(times=...\)` must speak of .* 3 .*, got 2"):
        allocate(AffineTime(np.ones(2), np.ones(2)), Cluster(3, 8))


def test_a_model_that_is_not_finite_is_named_by_rank():
    """A user's curve that says inf for what does not fit is told of `max_batch_size`."""

    class Bursting(Quadratic):
        def seconds(self, batch_size):
            return np.where(batch_size > np.array([9, 4, 9]), np.inf, super().seconds(batch_size))

    with pytest.raises(ValueError, match=r"finite .* of rank 1\. Cap .* `max_batch_size`"):
        allocate(Bursting(), Cluster(3, 12, max_batch_size=9))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_batch_size": 2}, r"at most 6, the summed `max_batch_size` .* got 8"),
        ({"min_batch_size": 3}, r"at least 9, the summed `min_batch_size` .* got 8"),
        (
            {"min_batch_size": np.array([0, 2, 0]), "max_batch_size": np.array([8, 1, 8])},
            r"min <= max .* got 2 and 1 .* on rank 1\. Raise `max_batch_size`",
        ),
        ({"max_batch_size": 3, "granularity": 2}, r"at most 6, .* in whole granules, got 8"),
    ],
)
def test_bounds_that_cannot_be_met_say_which_and_what_would_do(bounds, message):
    """The cluster refuses them before any solver sees it."""
    with pytest.raises(ValueError, match=message):
        Cluster(3, 8, **bounds)


@pytest.mark.parametrize(
    ("global_batch_size", "expected"), [(100, [56, 28, 16]), (96, [56, 24, 16]), (24, [8, 8, 8])]
)
def test_one_worker_carries_what_is_less_than_a_granule(global_batch_size, expected):
    """Shares of 4 : 2 : 1 in granules of 8."""
    cluster = Cluster(3, global_batch_size, granularity=8)

    assert apportion(np.array([4.0, 2.0, 1.0]), cluster).tolist() == expected


def test_a_full_worker_passes_its_share_on():
    """The others divide it in their own proportion."""
    cluster = Cluster(3, 100, max_batch_size=np.array([10, 100, 100]))

    assert apportion(np.array([8.0, 2.0, 1.0]), cluster).tolist() == [10, 60, 30]


@pytest.mark.parametrize("seed", range(50))
def test_nobody_is_a_granule_away_from_the_exact_share(seed):
    """Without bounds in the way, each batch size is the exact share rounded up or down."""
    rng = np.random.default_rng(seed)
    shares, granule = rng.uniform(1, 4, 6), rng.choice([1, 4, 16], 6)
    cluster = Cluster(6, int(rng.integers(400, 4000)), granularity=granule)

    away = apportion(shares, cluster) - cluster.global_batch_size * shares / shares.sum()

    assert (abs(away) < granule).all()


def test_a_share_of_nearly_nothing_still_fills_up():
    """One worker at its cap and one whose share is a trillionth: the rest is the latter's."""
    cluster = Cluster(2, 26, 0, np.array([14, 15]), np.array([2, 3]))

    assert apportion(np.array([1.0, 1e-13]), cluster).tolist() == [14, 12]


def test_what_does_not_divide_goes_to_the_largest_remainders():
    """And among equal ones to the lower rank."""
    assert in_proportion(10, (1, 1, 1)).tolist() == [4, 3, 3]
    assert in_proportion(10, (0, 5, 1)).tolist() == [0, 8, 2]
    assert in_proportion(0, (3, 4)).tolist() == [0, 0]


PLANNED = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)


def one_by_one(num_samples, sizes, most):
    """The definition: one each for ranks with a part, then ever to the least part."""
    found = [0] * len(sizes)
    firsts = sorted((rank for rank, size in enumerate(sizes) if size), key=lambda r: -sizes[r])
    for number in range(num_samples):
        if number < len(firsts):
            rank = firsts[number]
        else:
            free = [rank for rank in firsts if found[rank] < most[rank]]
            rank = min(free, key=lambda r: (Fraction(found[r] + 1, sizes[r]), r))
        found[rank] += 1
    return found


@given(PLANNED, st.integers(0, 300), st.integers(0, 2**32))
def test_a_plan_is_scaled_to_a_step_of_any_size(sizes, num_samples, seed):
    """Exactly, within caps if these can hold; the plan itself at its own size; never fewer."""
    most = np.random.default_rng(seed).integers(1, 80, len(sizes))
    fits = sum(cap for cap, size in zip(most, sizes, strict=True) if size) >= num_samples
    caps = most if fits else [num_samples] * len(sizes)
    found, more = scaled(num_samples, sizes, most), scaled(num_samples + 1, sizes)

    assert found.tolist() == one_by_one(num_samples, sizes, caps)
    assert (more >= scaled(num_samples, sizes)).all()
    assert scaled(sum(sizes), sizes).tolist() == sizes


def test_a_scaled_plan_keeps_the_slowest_rank_short():
    """Of ranks at speeds 1:7, of 9 samples the slow one gets 1, in whose time the other does 7."""
    assert scaled(9, (3, 21)).tolist() == [1, 8]
    assert scaled(2, (1, 1, 22)).tolist() == [1, 0, 1]
    assert scaled(4, (40, 1, 1)).tolist() == [2, 1, 1]


@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 20))
def test_a_batch_is_cut_into_whole_granules(num_samples, limit, granule):
    """As few as the limit allows, equal within a granule; the last takes what is left of one."""
    sizes = cut(num_samples, limit, granule)
    kept = granule if granule <= limit else 1

    assert sum(sizes) == num_samples
    assert min(sizes) >= 1
    assert max(sizes) <= limit
    if num_samples > limit:
        assert all(size % kept == 0 for size in sizes[:-1])
        assert len(sizes) == -(-num_samples // (limit // kept * kept))
        assert max(sizes) - min(sizes[:-1] or sizes) <= kept


@given(
    st.integers(0, 400),
    st.none() | st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 30),
)
def test_a_batch_is_cut_into_as_many_as_others_have(num_samples, limit, granule, fewest):
    """No fewer than those, nor than it needs. Where samples are too few, the first have none."""
    needed = len(cut(num_samples, limit, granule))
    sizes = cut(num_samples, limit, granule, fewest=max(needed, fewest))

    assert len(sizes) == max(needed, fewest)
    assert sum(sizes) == num_samples
    assert max(sizes) <= (limit or num_samples)
    assert sizes[-1] > 0 or not num_samples
    assert min(sizes) > 0 or num_samples < len(sizes)


@given(st.integers(1, 400), st.integers(1, 60))
def test_with_limit_and_granule_alike_there_is_one_size(num_samples, size):
    """All but the last have exactly that many."""
    sizes = cut(num_samples, size, size)

    assert set(sizes[:-1]) <= {size}
    assert sizes[-1] == (num_samples % size or size)


@pytest.mark.parametrize(("num_samples", "limit"), [(10, 3), (12, 3), (1, 5), (0, 5), (7, None)])
def test_cutting_is_fair(num_samples, limit):
    """Sizes add up, differ by one at most, and one fewer would break the limit."""
    sizes = cut(num_samples, limit)

    assert sum(sizes) == num_samples
    assert max(sizes) - min(sizes) <= 1
    assert limit is None or max(sizes) <= limit
    assert limit is None or (len(sizes) - 1) * limit < max(num_samples, 1)
