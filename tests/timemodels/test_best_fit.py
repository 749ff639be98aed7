"""The kind of curve is chosen by what it foretells."""

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, allocate
from evenstep.solve._allocate import makespan_s
from evenstep.timemodels import CubicTime, PiecewiseTime
from tests.timemodels.drawn import SideBySide
from tests.timemodels.measured import DENSE, DOUBLING, best_fit, curve, fit, of_one, profile

TRUTHS = {
    "affine": of_one(AffineTime, 0.01, 1e-3),
    "piecewise": of_one(PiecewiseTime, 0.04, 100, 8e-4),
    "staircase": of_one(PiecewiseTime, 0.01, 0, 0.02, 32),
    "cubic": of_one(CubicTime, [4e-9, -1.2e-6, 3e-4, 0.01], 256),
}


@pytest.mark.parametrize("kind", TRUTHS)
def test_the_kind_is_found_under_noise_of_two_percent(kind):
    """In each of twenty profiles, and the times within 3 %."""
    for seed in range(20):
        found = best_fit(*profile(TRUTHS[kind], DENSE, seed=seed))

        assert found.kinds == (kind,), seed
        assert abs(curve(found.times) / curve(TRUTHS[kind]) - 1).max() < 0.03, seed
        assert found.error[0] < 0.02, seed


def test_a_straight_line_without_noise_needs_no_more_than_a_line():
    """Where all kinds meet the profile, the fewest parameters win."""
    assert best_fit(*profile(TRUTHS["affine"], DOUBLING, noise=0)).kinds == ("affine",)


def test_workers_of_different_kinds_stand_side_by_side():
    """Each has the curve that it would have alone, on profiles of different lengths."""
    order = ["cubic", "affine", "staircase", "affine", "piecewise"]
    profiles = [
        profile(TRUTHS[kind], DENSE if rank else DENSE[::2], seed=rank)
        for rank, kind in enumerate(order)
    ]
    sizes, seconds = ([each[k][0] for each in profiles] for k in (0, 1))
    found = best_fit(sizes, seconds)

    assert found.kinds == tuple(order)
    assert isinstance(found.times, SideBySide)
    for rank, (b, s) in enumerate(profiles):
        alone = best_fit(b, s)
        at = found.times.seconds(np.full(5, 77))[rank]
        assert at == alone.times.seconds(np.array([77]))[0], rank
        assert found.error[rank] == alone.error[0], rank


def test_the_plan_is_close_to_that_of_the_true_curves():
    """What the fits are for: a split by them costs at most 5 % over the best."""
    truth = SideBySide(tuple(TRUTHS.values()), tuple(np.arange(4)[:, None]))
    cluster = Cluster(4, 512, max_batch_size=256)
    for seed in range(10):
        profiles = [profile(each, DENSE, seed=seed) for each in TRUTHS.values()]
        sizes, seconds = ([each[k][0] for each in profiles] for k in (0, 1))
        planned = allocate(best_fit(sizes, seconds).times, cluster)

        assert makespan_s(truth, planned) <= 1.05 * makespan_s(truth, allocate(truth, cluster))


@pytest.mark.parametrize("num_sizes", [2, 3])
def test_few_sizes_give_a_line(num_sizes):
    """With two there is nothing to leave out, and so no error to tell."""
    sizes, seconds = [DOUBLING[:num_sizes]], [np.array([1.0, 1.1, 4.0])[:num_sizes]]
    found = best_fit(sizes, seconds)

    assert found.kinds == ("affine",)
    assert curve(found.times).tolist() == curve(fit("affine", sizes, seconds)).tolist()
    assert np.isnan(found.error[0]) == (num_sizes == 2)


def test_a_parameter_more_has_to_earn_its_place():
    """On lines of much noise and few sizes, most choices are lines."""
    kinds = [
        best_fit(*profile(TRUTHS["affine"], DOUBLING, seed=s, noise=0.2)).kinds for s in range(20)
    ]

    assert kinds.count(("affine",)) >= 15


def test_the_same_profile_gives_the_same_curve_and_is_left_alone():
    """A value in, a value out."""
    sizes, seconds = profile(TRUTHS["cubic"], DENSE)
    before = sizes[0].copy(), seconds[0].copy()
    first, second = best_fit(sizes, seconds), best_fit(sizes, seconds)

    assert curve(first.times).tolist() == curve(second.times).tolist()
    assert (sizes[0] == before[0]).all()
    assert (seconds[0] == before[1]).all()


def test_sizes_too_large_for_a_cubic_are_fitted_by_the_others():
    """Tokens, say, which a cubic would have to tabulate."""
    sizes = 2 ** np.arange(12, 23)
    found = best_fit([sizes], [1e-9 * sizes.astype(float) ** 2])

    assert found.kinds[0] != "cubic"
