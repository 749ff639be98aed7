"""Lines, pieces, cubics and tables: exact, invertible, and found again in noisy profiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import lsq_linear, nnls

from evenstep import AffineTime, Cluster, allocate
from evenstep.timemodels import CubicTime, PiecewiseTime, Profile, bisect_batch
from evenstep.timemodels._curves import LEAST_RISE, lines_through, medians, nonnegative
from tests.timemodels.measured import DENSE, DOUBLING, curve, fit, of_one, profile

from ..tables import TableTime

KINDS = {PiecewiseTime: 3, CubicTime: 4}  # and their parameters
CURVES = [
    (PiecewiseTime, of_one(AffineTime, 0.01, 1e-3), DOUBLING),
    (CubicTime, of_one(AffineTime, 0.01, 1e-3), DOUBLING),
    (PiecewiseTime, of_one(PiecewiseTime, 0.04, 40, 8e-4), DENSE),
    (PiecewiseTime, of_one(PiecewiseTime, 0.04, 100, 8e-4), DENSE),
    (CubicTime, of_one(CubicTime, [4e-9, -1.2e-6, 3e-4, 0.01], 256), DOUBLING),
    (CubicTime, of_one(CubicTime, [2e-9, 0.0, 2e-5, 0.01], 256), DOUBLING),
]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(("kind", "truth", "sizes"), CURVES)
def test_a_known_curve_is_found_under_noise_of_two_percent(kind, truth, sizes):
    """Five measurements a size: within 3 % at every size, the noise's own measure of a point."""
    for seed in range(20):
        found = fit(kind, *profile(truth, sizes, seed=seed))

        assert abs(curve(found) / curve(truth) - 1).max() < 0.03, seed


def test_the_parameters_are_the_curves_own():
    """Not only the times: the knee is what a person reads off."""
    truth = of_one(PiecewiseTime, 0.04, 100, 8e-4)
    for seed in range(20):
        knee = fit(PiecewiseTime, *profile(truth, DENSE, seed=seed))

        assert knee.flat_s[0] == pytest.approx(0.04, rel=0.02)
        assert knee.saturation[0] == pytest.approx(100, abs=8)
        assert knee.slope_s[0] == pytest.approx(8e-4, rel=0.1)


@pytest.mark.parametrize(("kind", "truth", "sizes"), CURVES)
def test_without_noise_the_curve_is_met(kind, truth, sizes):
    """Knees are tried one by one, so they are found exactly."""
    found = fit(kind, *profile(truth, sizes, noise=0))

    assert curve(found) == pytest.approx(curve(truth), rel=1e-6)


@every_kind
def test_a_hiccup_among_the_repeats_is_not_seen(kind):
    """The median of five stays where it was when one of them takes ten times as long."""
    truth = AffineTime(np.array([0.01]), np.array([1e-3]))
    (sizes,), (seconds,) = profile(truth, DOUBLING, noise=0)
    seconds[::5] *= 10

    assert curve(fit(kind, [sizes], [seconds])) == pytest.approx(
        curve(fit(kind, *profile(truth, DOUBLING, noise=0)))
    )


@every_kind
@pytest.mark.parametrize("rise", [0.0, -0.5])
def test_samples_are_never_free(kind, rise):
    """A profile that is flat, or falls, still gets a curve that rises somewhere."""
    sizes = np.array([1, 2, 4, 8, 16])
    times = fit(kind, [sizes], [2.0 + rise * np.log2(sizes) / 4])
    far_s = curve(times, np.array([1, 16, 2**20]))

    assert (np.diff(far_s) > 0).any()
    assert times.largest_batch(10.0, np.array([2**40]))[0] < 2**40
    assert (far_s > 0).all()


@every_kind
def test_noise_alone_never_makes_a_curve_that_falls(kind):
    """Whatever was measured, what comes out is a time model."""
    for seed in range(30):
        random = np.random.default_rng(seed)
        sizes = np.sort(random.choice(np.arange(1, 200), 9, replace=False))
        found = curve(fit(kind, [sizes], [random.exponential(size=9) + 1e-3]), np.arange(300))

        assert (np.diff(found) >= 0).all(), seed
        assert np.isfinite(found).all(), seed


def test_a_cubic_never_falls_by_itself():
    """The model would hold it level, but a fit that needs that is none."""
    for seed in range(60):
        random = np.random.default_rng(seed)
        sizes = np.sort(random.choice(np.arange(1, 200), 9, replace=False))
        found = fit(CubicTime, [sizes], [random.exponential(size=9) + 1e-3])
        cubic = np.polyval(found.coefficients[0], np.arange(sizes[-1] + 1))

        assert cubic[0] >= 0, seed
        assert (np.diff(cubic) > -1e-12).all(), seed


def test_a_line_has_its_knee_at_nothing():
    """Up to the smallest size measured, any knee would do."""
    truth = AffineTime(np.array([0.01]), np.array([1e-3]))

    assert fit(PiecewiseTime, *profile(truth, DOUBLING, noise=0)).saturation.tolist() == [0]


@every_kind
def test_every_worker_is_fitted_by_itself(kind):
    """Profiles of two lengths give what they would give alone."""
    truth = AffineTime(np.array([0.01]), np.array([1e-3]))
    (long,), (long_s,) = profile(truth, DENSE, seed=1)
    (short,), (short_s,) = profile(truth, DOUBLING, seed=2)
    both = fit(kind, [long, short], [long_s, short_s])
    alone = [fit(kind, [long], [long_s]), fit(kind, [short], [short_s])]

    assert both.world_size == 2
    for size in (1, 40, 256):
        expected = [float(each.seconds(np.array([size]))[0]) for each in alone]
        assert both.seconds(np.array([size, size])).tolist() == expected


@every_kind
def test_units_do_not_matter(kind):
    """Seconds or 1e-180 of them: the same curve, scaled."""
    truth = PiecewiseTime(np.array([0.04]), np.array([40]), np.array([8e-4]))
    sizes, (seconds,) = profile(truth, DENSE)
    scaled = curve(fit(kind, sizes, [seconds * 2.0**-600]))

    assert scaled == pytest.approx(curve(fit(kind, sizes, [seconds])) * 2.0**-600, rel=1e-9)


@pytest.mark.parametrize(("kind", "least"), KINDS.items())
def test_too_few_sizes_are_counted_out(kind, least):
    """As many as parameters are enough, one fewer is refused with the rank."""
    enough, fewer = np.arange(1, least + 1), np.arange(1, least)
    seconds = [np.ones(least), np.ones(least - 1)]

    assert fit(kind, [enough], seconds[:1]).world_size == 1
    rule = rf"`{kind.__name__}\.fitted\(profiles=...\)` must hold at least {least} different sizes "
    with pytest.raises(ValueError, match=rf"{rule}on rank 1, got"):
        fit(kind, [enough, fewer], seconds)


@every_kind
def test_no_profile_is_refused(kind):
    """With what to do."""
    with pytest.raises(ValueError, match=r"hold a profile for each worker, got none\. Measure"):
        fit(kind, [], [])


@every_kind
def test_a_fit_splits_by_speed(kind):
    """Three quarters go to the worker at three times the speed."""
    sizes = np.array([1, 2, 4, 8, 16, 24])
    times = fit(kind, [sizes, sizes], [0.001 * sizes, 0.003 * sizes])

    assert abs(allocate(times, Cluster(2, 20)) - [15, 5]).max() <= 1


COSTS = st.one_of(st.just(0.0), st.floats(1e-9, 1e3), st.floats(0, 1e12))


def test_no_samples_take_no_time():
    """The fixed cost is not paid by a worker that sits out."""
    times = AffineTime(np.array([3.0, 3.0]), np.array([2.0, 0.0]))

    assert times.seconds(np.array([0, 0])).tolist() == [0, 0]
    assert times.seconds(np.array([1, 4])).tolist() == [5, 3]


@given(COSTS, COSTS, st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([-1, 0, 1]))
def test_the_largest_batch_is_exact_to_the_last_bit(intercept_s, slope_s, size, most, side):
    """Around a time that some size really takes, where a closed form errs by one."""
    times = AffineTime(np.array([intercept_s]), np.array([slope_s]))
    budget_s = float(times.seconds(np.array([size]))[0])
    budget_s = float(np.nextafter(budget_s, side * np.inf)) if side else budget_s
    batch = times.largest_batch(budget_s, np.array([most]))

    assert 0 <= batch[0] <= most
    assert batch[0] == 0 or times.seconds(batch)[0] <= budget_s
    assert batch[0] == most or times.seconds(batch + 1)[0] > budget_s
    assert batch == bisect_batch(times.seconds, budget_s, most=np.array([most]))


def test_a_flat_line_holds_all_or_nothing():
    """At a slope of 0 every batch takes as long as one sample."""
    times = AffineTime(np.array([3.0, 3.5]), np.zeros(2))

    assert times.largest_batch(3.0, np.array([70, 70])).tolist() == [70, 0]


def test_the_costs_are_the_models_own():
    """Writing to what was given changes nothing, and the fields are read-only."""
    slope_s = np.ones(2)
    times = AffineTime(np.zeros(2), slope_s)
    slope_s[0] = 9

    assert times.slope_s.tolist() == [1, 1]
    assert not times.slope_s.flags.writeable


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["intercept_s", "slope_s"])
def test_a_cost_that_cannot_be_is_named_by_rank(name, bad):
    """The message gives class and argument, rule, value, rank and remedy."""
    costs = {"intercept_s": np.zeros(2), "slope_s": np.ones(2), name: np.array([1.0, bad])}

    with pytest.raises(ValueError, match=rf"`AffineTime\({name}=...\)` .*, got {bad} on rank 1\. "):
        AffineTime(**costs)


@pytest.mark.parametrize(("intercept_s", "slope_s"), [(np.zeros(2), np.ones(3)), (0.0, 1.0)])
def test_one_value_per_worker_is_asked_for(intercept_s, slope_s):
    """Neither scalars nor two lengths."""
    with pytest.raises(ValueError, match="Give one value per worker"):
        AffineTime(intercept_s, slope_s)


def seconds(times, sizes):
    return [float(times.seconds(np.array([size]))[0]) for size in sizes]


def test_a_cubic_that_rises_is_read_as_it_is():
    """p3 b^3 + p2 b^2 + p1 b + p0, in the paper's order, and 0 without samples."""
    times = CubicTime(np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([10]))

    assert seconds(times, [0, 1, 2, 10]) == [0, 10, 26, 1234]


def test_where_it_falls_it_is_held_level():
    """(b - 2)^2 (b - 8) + 40 climbs to 40 at 2, dips to 8 at 6, and is past 40 from 9 on."""
    dips = np.array([[1.0, -12.0, 36.0, 8.0]])
    times = CubicTime(dips, np.array([10]))

    assert seconds(times, [1, 2, 3, 6, 8, 9]) == [33, 40, 40, 40, 40, 89]


def test_a_cubic_below_zero_is_free_of_charge_there():
    """A time is never negative."""
    times = CubicTime(np.array([[0.0, 0.0, 1.0, -3.0]]), np.array([10]))

    assert seconds(times, [1, 3, 4]) == [0, 0, 1]


@pytest.mark.parametrize(
    ("coefficients", "last_s", "slope_s"),
    [([0.0, 1.0, 0.0, 0.0], 100, 19), ([0.0, 0.0, 1.0, 90.0], 100, 10), ([0, 0, 0, 50], 50, 5)],
)
def test_past_the_profile_it_goes_straight_on(coefficients, last_s, slope_s):
    """By the last step, or by the average where that is steeper: never for free."""
    times = CubicTime(np.array([coefficients]), np.array([10]))

    assert seconds(times, [10, 11, 30]) == [last_s, last_s + slope_s, last_s + 20 * slope_s]


def test_every_worker_has_a_profile_of_its_own():
    """The shorter one is not read past its end."""
    times = CubicTime(np.array([[0.0, 0, 1, 0], [0.0, 1, 0, 0]]), np.array([2, 4]))

    assert times.seconds(np.array([4, 4])).tolist() == [4, 16]
    assert times.seconds(np.array([2, 6])).tolist() == [2, 30]


@pytest.mark.parametrize(
    ("coefficients", "most", "message"),
    [
        (np.ones((2, 3)), [9, 9], r"CubicTime\(coefficients=...\)` must have shape .* got \(2, 3"),
        (np.ones(4), [9], r"CubicTime\(coefficients=...\)` must have shape"),
        ([[0, 0, 1, 0], [0, np.nan, 1, 0]], [9, 9], r"must be finite .* nan .* on rank 1\. "),
        ([[0, 0, 1, 0], [0, 0, -1, 0]], [9, 9], r"positive time somewhere .* on rank 1\. "),
        ([[1e300, 0, 0, 0]], [2**20], r"a finite, positive time somewhere on 1..most"),
        ([[0, 0, 1, 0]], [9, 9], r"CubicTime\(most=...\)` must have the shape \(1,\) of "),
        (
            [[0, 0, 1, 0]],
            [0],
            r"must be in \[1, 1048576\] on every rank, got 0 on rank 0",
        ),
        (
            [[0, 0, 1, 0]],
            [2**20 + 1],
            r"must be in \[1, 1048576\] on .*, got 1048577 on rank 0",
        ),
        ([[0, 0, 1, 0]], [9.0], r"CubicTime\(most=...\)` must be integers, got float64"),
    ],
)
def test_what_is_no_curve_is_named(coefficients, most, message):
    """Class and argument, rule, value, rank and remedy."""
    with pytest.raises(ValueError, match=message):
        CubicTime(np.array(coefficients, np.float64), np.array(most))


GOOD = {"flat_s": [1.0, 2.0], "saturation": [4, 0], "slope_s": [0.5, 0.5]}


def piecewise(**changed):
    return PiecewiseTime(**{name: np.array(value) for name, value in (GOOD | changed).items()})


def test_any_batch_that_does_not_fill_the_device_takes_as_long():
    """And a worker without samples takes no time at all."""
    times = piecewise()

    assert [times.seconds(np.array([b, b])).tolist() for b in (0, 1, 4, 6)] == [
        [0, 0],
        [1, 2.5],
        [1, 4],
        [2, 5],
    ]


def test_a_budget_below_the_flat_part_holds_nothing():
    """At it, all that the device takes in at once."""
    times, most = piecewise(), np.array([9, 9])

    assert times.largest_batch(np.nextafter(1.0, 0), most).tolist() == [0, 0]
    assert times.largest_batch(1.0, most).tolist() == [4, 0]
    assert times.largest_batch(2.4, most).tolist() == [6, 0]


def test_a_device_is_filled_before_others_are_given_more():
    """Up to saturation samples are free, so the larger device takes what it can for nothing."""
    times = piecewise(flat_s=[1.0, 1.0], saturation=[30, 10], slope_s=[0.1, 0.1])

    assert allocate(times, Cluster(2, 40)).tolist() == [30, 10]
    assert allocate(times, Cluster(2, 60)).tolist() == [40, 20]


def test_without_saturation_it_is_a_straight_line():
    """Bit for bit."""
    intercept_s, slope_s, sizes = np.array([0.3, 0.7]), np.array([0.1, 1e-9]), np.array([7, 12345])
    times = PiecewiseTime(intercept_s, np.zeros(2, np.int64), slope_s)

    assert times.seconds(sizes).tolist() == AffineTime(intercept_s, slope_s).seconds(sizes).tolist()


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("flat_s", [1.0, -1.0], r"be finite and at least 0 on every rank, got -1.0 on rank 1\. "),
        ("flat_s", 1.0, r"have shape \(world_size,\), got \(\)\. "),
        ("saturation", [4, -1], r"be in \[0, \d+\] on every rank, got -1 on rank 1\. "),
        ("saturation", [4.0, 2.5], r"be integers, got float64\. Count whole samples\."),
        ("saturation", [4], r"have the shape \(2,\) of `flat_s`, got \(1,\)\. "),
        ("slope_s", [0.5, np.inf], r"be finite .*, got inf on rank 1\. "),
        ("slope_s", [0.5, 1.0, 1.0], r"have the shape \(2,\) of `flat_s`, got \(3,\)\. "),
    ],
)
def test_what_is_no_piecewise_curve_is_named(name, bad, message):
    """Class and argument, rule, value, rank and remedy."""
    with pytest.raises(ValueError, match=rf"`PiecewiseTime\({name}=...\)` must {message}"):
        piecewise(**{name: bad})


@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(-1, 12))
def test_the_largest_batch_is_the_last_that_fits(seed, num_sizes, budget_s):
    """Counted along the rows, with plateaus and with a cap of its own for every worker."""
    random = np.random.default_rng(seed)
    table = np.cumsum(random.integers(0, 2, (3, num_sizes + 1)), axis=1) * 1.0
    table[:, 0] = 0
    most = random.integers(0, num_sizes + 1, 3)
    batch = TableTime(table).largest_batch(budget_s, most)

    expected = [
        max((b for b in range(cap + 1) if row[b] <= budget_s), default=0)
        for row, cap in zip(table, most, strict=True)
    ]
    assert batch.tolist() == expected


def test_seconds_are_read_from_the_table():
    """Each worker from its own row."""
    times = TableTime(np.array([[0.0, 1.0, 1.5], [0.0, 2.0, 2.0]]))

    assert times.world_size == 2
    assert times.seconds(np.array([2, 1])).tolist() == [1.5, 2.0]


GOOD_PROFILE = {"sizes": [2, 2, 4], "seconds": [0.1, 0.2, 0.3]}


def test_the_arrays_are_the_profiles_own():
    """Writing to what was given changes nothing, and the fields are read-only."""
    given_ = {name: np.array(value) for name, value in GOOD_PROFILE.items()}
    profile = Profile(**given_)
    for name, array in given_.items():
        array[:] = 1

        assert getattr(profile, name).tolist() == GOOD_PROFILE[name]
        assert not getattr(profile, name).flags.writeable


BAD_VALUES = [
    ("sizes", [4, 2, 4], r"be ascending, got 2 as measurement 1\. Sort: "),
    ("sizes", [0, 2, 4], r"be at least 1, got 0 as measurement 0\. "),
    ("sizes", [2, 2, 2], r"hold at least two sizes, got \[2\]\. "),
    ("sizes", [2.0, 2.0, 4.0], r"be a list of integers, got \[2.0, 2.0, 4.0\]\. "),
    ("sizes", [True, True, True], r"be a list of integers"),
    ("sizes", [2, [2], 4], r"be a list of integers"),
    ("sizes", [2, 4, 2**70], r"be a list of integers"),
    ("sizes", [], r"be a list of integers"),
    ("sizes", 4, r"be a list of integers, got 4\. "),
    ("seconds", [0.1, 0.2], r"have the shape \(3,\) of `sizes`, got \(2,\)\. "),
    ("seconds", [0.1, 0.0, 0.3], r"be positive and finite, got 0.0 as measurement 1\. "),
    ("seconds", [0.1, 0.2, float("nan")], r"be positive and finite, got nan as measurement 2\. "),
    ("seconds", [0.1, 0.2, float("inf")], r"be positive and finite, got inf"),
    ("seconds", ["a", "b", "c"], r"be a list of numbers"),
]


@pytest.mark.parametrize(("name", "bad", "message"), BAD_VALUES)
def test_what_was_never_measured_is_refused(name, bad, message):
    """By class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=rf"`Profile\({name}=...\)` must {message}"):
        Profile(**(GOOD_PROFILE | {name: bad}))


def relative_loss(predicted, y):
    return ((predicted / y - 1) ** 2).mean()


def test_no_coefficients_err_less_without_a_negative_one():
    """On columns of all sorts, those of which some have to stay out included."""
    for seed in range(200):
        random = np.random.default_rng(seed)
        columns, y = random.normal(size=(7, 4)), random.uniform(0.1, 3, 7)
        found = nonnegative(columns, y)
        expected, _ = nnls(columns / y[:, None], np.ones(7))

        assert (found >= 0).all(), seed
        assert found == pytest.approx(expected, abs=1e-9), seed


def test_no_line_errs_less_within_its_bounds():
    """For every candidate by itself: rising, falling, and with an intercept below 0."""
    for seed in range(200):
        random = np.random.default_rng(seed)
        x, y = random.integers(0, 9, (5, 6)) + np.eye(5, 6), random.uniform(0.1, 3, 6)
        typical = (1 / y).sum() / (y**-2.0).sum()
        for row, intercept, slope, loss in zip(x, *lines_through(x, y), strict=True):
            least = LEAST_RISE * typical / row.max()
            scaled = np.stack([1 / y, row / y], axis=1)
            best = lsq_linear(scaled, np.ones(6), bounds=([0, least], np.inf), tol=1e-14).x

            assert intercept >= 0, seed
            assert slope >= least * (1 - 1e-12), seed
            assert loss == pytest.approx(relative_loss(intercept + slope * row, y)), seed
            assert loss <= relative_loss(best[0] + best[1] * row, y) + 1e-9, seed


def test_a_size_is_one_point_however_often_it_was_measured():
    """The median of its times, in whatever number."""
    points = medians(Profile([2, 2, 2, 4, 4, 8], [9.0, 1.0, 2.0, 3.0, 5.0, 7.0]))

    assert points.sizes.tolist() == [2, 4, 8]
    assert points.seconds.tolist() == [2, 4, 7]
