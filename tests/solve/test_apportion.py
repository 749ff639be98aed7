"""Facts special to `apportion` and `cut`; what holds for every split is in the policy contract."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cluster, apportion
from evenstep.solve._apportion import cut, in_proportion


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
