"""A stream that all ranks read is shared out by the lengths of its samples."""

from __future__ import annotations

import pytest

from evenstep.testing import run_workers

from .._tiers import Groups, slow_but
from .cost_runs import BATCH_SIZE, NUM_SAMPLES
from .stream_cost_runs import CAP, CASES, alone, order, refusals, steps, train, unlike

pytestmark = pytest.mark.cluster
FIRST = ("a function, read by workers", "tokens capped")


@pytest.fixture(scope="module")
def runs():
    """What each of three ranks saw of every step, by case."""

    def run(names):
        ranks = run_workers(3, steps, list(names))
        return {name: [rank[name] for rank in ranks] for name in names}

    return Groups(FIRST, CASES, run)


@pytest.mark.parametrize("name", slow_but(FIRST, CASES))
def test_a_step_has_the_samples_that_it_has_by_position(runs, name):
    """Each once, with their gradient within 1e-12; the short last step has fewer than 3 ranks."""
    positions = order(CASES[name][1])
    for rank in runs[name]:
        for first, parts in zip(range(0, len(positions), BATCH_SIZE), rank["steps"], strict=True):
            expected = sorted(positions[first : first + BATCH_SIZE])
            assert sorted(index for part in parts for index in part) == expected
        assert rank["error"] <= 1e-12


@pytest.mark.parametrize("name", slow_but(FIRST, CASES))
def test_ranks_get_unlike_numbers_of_samples_by_their_lengths(runs, name):
    """In some of the full steps, as soon as a plan knows lengths; no forward exceeds its cap."""
    ranks = runs[name]
    counts = [set(map(len, parts)) for parts in ranks[0]["steps"][:-1]]

    assert any(len(some) > 1 for some in counts)
    if CASES[name][0].max_size is not None:
        assert max(rank["largest"] for rank in ranks) <= CAP


def trained(world_size, **settings):
    """Train on some ranks; return each one's parameters, and its forwards of each step."""
    return run_workers(world_size, _train, settings, timeout_s=120)


def _train(rank, settings):
    return train(rank, **settings)


def assert_as_alone(ranks):
    """All ranks have the parameters of one process, within 1e-12."""
    theirs = alone()
    for parameters, _ in ranks:
        assert float((parameters - theirs).norm() / theirs.norm()) <= 1e-12


def steps_of(ranks):
    """The samples of each step, sorted."""
    each = zip(*(seen for _, seen in ranks), strict=True)
    return [sorted(i for rank in step for forward in rank for i in forward) for step in each]


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks(tmp_path):
    """Three ranks, then two: each sample once, in its step, and the parameters of one process."""
    before = trained(3, folder=tmp_path, stop_after=3)
    after = trained(2, folder=tmp_path)

    assert steps_of(before) + steps_of(after) == [
        list(range(first, min(first + BATCH_SIZE, NUM_SAMPLES)))
        for first in range(0, NUM_SAMPLES, BATCH_SIZE)
    ]
    assert_as_alone(after)


@pytest.mark.slow
def test_a_sharded_model_makes_as_many_forwards_on_all_ranks():
    """Of unlike numbers of samples; the short last step has fewer samples than ranks."""
    ranks = trained(3, sharded=True)
    steps = list(zip(*(seen for _, seen in ranks), strict=True))[:-1]

    assert all(len(set(map(len, step))) == 1 for step in steps)
    assert any(len({sum(map(len, rank)) for rank in step}) > 1 for step in steps)
    assert_as_alone(ranks)


def test_ranks_that_find_other_lengths_hear_of_it_before_the_step():
    """On all of them, with the remedy."""
    for error in run_workers(2, unlike):
        assert "ranks find different lengths in the next step's samples" in error
        assert "draw what changes lengths from a seed that all ranks share" in error


def test_what_is_not_balanced_by_cost_is_refused():
    """With what to do instead."""
    found = run_workers(1, refusals)[0]

    assert 'stream="sharded"`, where no rank can compute samples of another' in found["sharded"]
    assert "`Cost(padded=...)` must be True or False for a stream" in found["padded"]
    assert "must name a field of each sample of a stream, or be a function" in found["lengths"]
    assert "must name a field of each sample of a stream, or be a function" in found["from_batch"]
    assert "'y' for a dict with ['number', 'x']" in found["field"]
    assert "2 where sample 0 of the stream has" in found["cap"]
