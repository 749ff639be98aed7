"""How a batch is cut into micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.solve._apportion import cut


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
