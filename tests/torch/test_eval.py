"""Evaluation: each sample once over all ranks, shared out by speed, and the exact mean."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from evenstep.testing import run_workers
from evenstep.torch import Balancer
from evenstep.torch._data.deal._plans import forwards, forwards_of_steps, spread

from .eval_runs import QUIET, fetched_apart, inside, lockstep, means, numbered, shares
from .loader_fakes import Items, flat

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a single core
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]
WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any)


@given(
    num_samples=st.integers(0, 200), weights=WEIGHTS, size=st.integers(1, 20), step=st.booleans()
)
def test_every_sample_has_one_owner(num_samples, weights, size, step):
    """Whatever the speeds; no forward is past the batch size, and lockstep is one."""
    ranks = [
        forwards(rank, num_samples, weights, batch_size=size, lockstep=step)
        for rank in range(len(weights))
    ]
    counted = [forward.tolist() for rank in ranks for forward in rank]
    shares = [sum(len(forward) for forward in rank) for rank in ranks]

    assert sorted(flat(counted)) == list(range(num_samples))
    assert all(len(forward) <= size for rank in ranks for forward in rank)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - num_samples * weight / sum(weights)) < 1
    if step:
        assert len({len(rank) for rank in ranks}) == 1
    else:
        assert [len(rank) for rank in ranks] == [-(-share // size) for share in shares]
        assert all(len(forward) for rank in ranks for forward in rank)


@given(num_samples=st.integers(0, 200), weights=WEIGHTS, size=st.integers(1, 20))
def test_in_lockstep_by_steps_every_rank_has_a_part_of_every_batch(num_samples, weights, size):
    """As many forwards as a plain evaluation, each over the same samples, and no stand-in."""
    world_size = len(weights)
    num_samples *= num_samples >= world_size
    step = size * world_size
    ranks = [
        forwards_of_steps(rank, num_samples, weights, step_size=step) for rank in range(world_size)
    ]
    ends = [*range(step, num_samples - world_size + 1, step), num_samples]
    steps = [sorted(flat(each.tolist() for each in of_one)) for of_one in zip(*ranks, strict=True)]

    assert steps == [list(range(*of_one)) for of_one in pairwise([0, *ends]) if num_samples]
    assert all(len(each) >= 1 for rank in ranks for each in rank)


def test_a_share_is_spread_over_the_whole_order():
    """In data sorted by length, everybody gets long and short ones alike."""
    owner = spread(np.array([60, 30, 10]))

    for tenth in owner.reshape(10, 10):
        assert np.abs(np.bincount(tenth, minlength=3) - [6, 3, 1]).max() <= 1


@pytest.fixture(scope="module")
def found():
    """What each of three ranks got, under sizes 9, 2 and 1."""
    return run_workers(3, shares)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("before", [10, 10, 10]),
        ("after", [23, 5, 2]),
        ("workers", [23, 5, 2]),
        ("workers again", [23, 5, 2]),
        ("one", [1, 0, 0]),
        ("collate", [23, 5, 2]),
        ("shuffled", [23, 5, 2]),
        ("shuffled again", [23, 5, 2]),
    ],
)
def test_each_sample_is_evaluated_once_by_speed(found, case, sizes):
    """Also by a rank that gets none at all; batches as torch cuts them, full ones first."""
    parts = [rank[case] for rank in found]
    length = sum(sizes)

    assert sorted(flat(map(flat, parts))) == list(range(length))
    assert [len(flat(part)) for part in parts] == sizes
    for part, size in zip(parts, sizes, strict=True):
        assert [len(batch) for batch in part] == [7] * (size // 7) + [size % 7] * (size % 7 > 0)
    if case != "before":
        assert [rank[case + " mean"] for rank in found] == [(length - 1) / 2] * 3


@pytest.mark.cluster
def test_each_sample_is_evaluated_once_where_ranks_have_fetched_unlike_numbers_of_steps():
    """Under plans that change: shares go by that of the newest step that all have trained on."""
    for parts in zip(*run_workers(2, fetched_apart), strict=True):
        assert sorted(flat(parts)) == list(range(30))


@pytest.mark.cluster
def test_a_sampler_that_draws_does_so_once_for_all_ranks(found):
    """Another order every time, the same on all ranks, which are seeded unlike."""
    first, second = (flat(map(flat, (rank[name] for rank in found)))
                     for name in ("shuffled", "shuffled again"))  # fmt: skip

    assert first != second
    assert first != sorted(first)


@pytest.mark.cluster
def test_means_are_those_of_one_process():
    """Over samples, over a count of one's own, and of names that a rank does not have."""
    one, other = run_workers(2, means)

    assert max(one["loss"], one["valid"], one["by hand"]) <= 1e-14
    assert one["rank 1 alone"] == other["rank 1 alone"] == 5.0
    assert one["bits"] == other["bits"]


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["fsdp", "buffers", "grad"])
@pytest.mark.parametrize(
    ("length", "counts"), [(24, [[3] * 7, [1, 1, 1, 0, 0, 0, 0]]), (1, [[1], [0]])]
)
def test_ranks_go_in_lockstep_where_a_forward_is_a_collective(kind, length, counts):
    """As many forwards on every rank, stand-ins of count 0, and still the exact mean."""
    results = run_workers(2, lockstep, kind, length, None, timeout_s=60)

    assert [result["counts"] for result in results] == counts
    assert max(result["error"] for result in results) <= 1e-15


@pytest.mark.cluster
def test_an_evaluation_inside_the_loop_disturbs_no_step():
    """Between hand-out and backward as well, under another plan at every step."""
    for errors in run_workers(2, inside):
        assert max(errors.values()) <= 1e-14


def evaluation(loader):
    return Balancer(runtime=QUIET).prepare_eval(loader)


def test_an_evaluation_ends_with_its_last_reference():
    """And with it the workers that persist: torch waits 5 s for each that is found as garbage."""
    validation = evaluation(numbered(8, batch_size=4))
    list(validation)
    held = weakref.ref(validation)
    gc.disable()
    try:
        del validation
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_process_evaluates_as_with_torchs_loader(num_workers):
    """The same batches in the same order."""
    loader = DataLoader(Items(23), batch_size=5, num_workers=num_workers)
    ours = [batch[0].tolist() for batch in evaluation(loader)]

    assert ours == [batch[0].tolist() for batch in loader]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: DataLoader(Stream()), "addressed by index, got the IterableDataset Stream. Leave"),
        (lambda: DataLoader(Items(8), drop_last=True), "evaluate every sample"),
        (lambda: DataLoader(Items(8), batch_size=None), "got batch_size=None"),
        (lambda: [1, 2], "be a torch `DataLoader`, got list"),
    ],
)
def test_a_loader_that_cannot_be_shared_out_is_refused(make, rule):
    """With the rule and the remedy."""
    with pytest.raises(ValueError, match=rule):
        evaluation(make())


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"lockstep": "step"}, 'be a bool or "steps"'),
        ({"lockstep": "steps", "cost": [1, 2, 3]}, "which counts samples"),
    ],
)
def test_a_lockstep_that_is_none_is_refused(settings, rule):
    """And one by steps beside a cost, which it would not heed."""
    with pytest.raises(ValueError, match=rule):
        Balancer(runtime=QUIET).prepare_eval(numbered(3), **settings)


def test_what_cannot_be_averaged_is_refused():
    """Values of several elements, negative counts, and values that belong to no batch."""
    loader = evaluation(numbered(3))
    with pytest.raises(RuntimeError, match="No batch of this loader is in hand"):
        loader.add("loss", 1.0)
    with pytest.raises(ValueError, match=r"be one number.*shape \(2,\)"):
        loader.add("loss", torch.ones(2), count=1)
    with pytest.raises(ValueError, match=r"must be at least 0, got -1"):
        loader.add("loss", 1.0, count=-1)


def test_a_new_loop_starts_new_means():
    """One that was left early does not count; a value over nothing, NaN perhaps, neither."""
    loader = evaluation(numbered(8, batch_size=2))
    for _ in loader:
        loader.add("loss", 100.0)
        break
    for (index,) in loader:
        loader.add("loss", float(index[0]))
        loader.add("nothing", float("nan"), count=0)

    assert loader.mean() == {"loss": 3.0}


def test_a_closed_balancer_evaluates_nothing():
    """It says so, rather than to evaluate alone."""
    balancer = Balancer(runtime=QUIET)
    balancer.close()
    with pytest.raises(RuntimeError, match="The balancer was closed"):
        balancer.prepare_eval(numbered(8))
