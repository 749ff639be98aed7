"""Packs that `benchmarks.lengths` compares: whole samples, each once, and the same work without."""

import numpy as np
import pytest

from benchmarks._lengths_packs import Packs, pack_orders, packs
from benchmarks._lengths_training import LONGEST, text

pytestmark = pytest.mark.slow  # to read the standard library takes seconds


@pytest.fixture(scope="module")
def data():
    """Functions of the standard library."""
    return text()


def test_every_sample_is_in_one_pack_and_no_pack_is_too_long(data):
    """Of at least 97 % of the room there is, with the costs of its samples in sum."""
    found = Packs(data)

    assert sorted(index for some in found.members for index in some) == list(range(len(data)))
    assert 0.97 * LONGEST <= found.lengths.mean() <= found.lengths.max() <= LONGEST
    assert found.lengths.sum() == data.lengths.sum()
    assert found.cost.sum() == data.cost.sum()
    for place in (0, len(found) - 1):
        assert sum(len(tokens) for tokens, _ in found[place]) == found.lengths[place]


def test_steps_with_and_without_packs_have_the_same_samples(data):
    """After the warm-up, but for one in ten, and no sample twice; tokens of a step alike."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        of_packs, of_samples = pack_orders(data, rng, warm_up=6, steps=13)
        counted = [i for place in of_packs[6:].ravel() for i in packs(data).members[place]]
        tokens = packs(data).lengths[of_packs[6:]].sum(), data.lengths[of_samples[6:]].sum()

        assert of_packs.shape[0] == of_samples.shape[0] == 19
        assert len(np.unique(of_samples)) == of_samples.size
        assert len(np.intersect1d(counted, of_samples[6:])) >= 0.9 * len(counted)
        assert tokens[1] == pytest.approx(tokens[0], rel=0.1)
