"""Streams: which samples a step has, that each counts once, and how a run goes on."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evenstep._planner import Plan
from evenstep.testing import run_workers

from .._tiers import slow_but
from . import stream_runs
from .loader_fakes import FixedPlan, Rich, flat
from .stream_fakes import LockedPlans, Numbers, Shuffled, cluster, counted, lone, once
from .test_loader_order import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a single core
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


@given(
    length=st.integers(0, 60),
    size=st.integers(1, 16),
    world_size=st.integers(1, 4),
    drop_last=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_step_of_the_same_stream_has_the_same_samples_under_any_plan(
    length, size, world_size, drop_last, seed
):
    """Step k has positions kB to (k+1)B, over two epochs with another plan at every step."""
    plans = LockedPlans(world_size, size, seed=seed)
    ranks = cluster(
        lambda rank: DataLoader(Numbers(length), drop_last=drop_last),
        plans,
        lambda loader, recorder: [counted(loader, recorder) for _ in range(2)],
        kind="same",
        world_size=world_size,
        size=size,
    )
    kept = length - length % size if drop_last else length
    for epoch in range(2):
        steps = [flat(step) for step in zip(*(rank[epoch] for rank in ranks), strict=True)]

        assert steps == [list(range(k, min(k + size, kept))) for k in range(0, kept, size)]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    size=st.integers(1, 16),
    seed=st.integers(0, 9),
    drop_last=st.booleans(),
)
def test_every_sample_of_the_shards_counts_once(lengths, size, seed, drop_last):
    """N of a step is what was delivered; all B while no shard is dry, and ranks end together."""
    world_size = len(lengths)
    firsts = [sum(lengths[:rank]) for rank in range(world_size)]
    plans = LockedPlans(world_size, size, seed=seed)

    def use(loader, recorder):
        parts = counted(loader, recorder)
        return parts, [call[3] for call in recorder.calls if call[0] == "step"]

    ranks = cluster(
        lambda rank: DataLoader(
            Numbers(firsts[rank], firsts[rank] + lengths[rank]), drop_last=drop_last
        ),
        plans,
        use,
        kind="sharded",
        world_size=world_size,
        size=size,
    )
    steps = [flat(step) for step in zip(*(parts for parts, _ in ranks), strict=True)]
    assert [[len(step) for step in steps]] * world_size == [totals for _, totals in ranks]
    left = [list(range(first, first + n)) for first, n in zip(firsts, lengths, strict=True)]
    for number, step in enumerate(steps):
        mine = [rank[0][number] for rank in ranks]
        for rank, part in enumerate(mine):
            assert part == left[rank][: len(part)]  # in the shard's own order
            assert len(part) <= size
        assert any(mine)
        if all(
            len(rest) >= b for rest, b in zip(left, plans.plans[number].batch_size, strict=True)
        ):
            assert len(step) == size
        left = [rest[len(part) :] for rest, part in zip(left, mine, strict=True)]
    if drop_last:
        assert all(len(step) == size for step in steps)
    else:
        assert not any(left)


@pytest.mark.parametrize("collate", [None, list], ids=["packed", "own-collate"])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_the_order_is_that_of_torchs_loader(num_workers, collate):
    """With the global batch as its batch size, and as many workers: their batches in turn."""
    stock = DataLoader(Numbers(50), batch_size=6, num_workers=num_workers)
    expected = flat(batch.tolist() for batch in stock)
    ranks = cluster(
        lambda rank: DataLoader(Numbers(50), num_workers=num_workers, collate_fn=collate),
        FixedPlan(3, 2, 1),
        counted,
        kind="same",
        world_size=3,
        size=6,
    )
    steps = [flat(step) for step in zip(*ranks, strict=True)]

    assert flat(steps) == expected
    assert [len(step) for step in steps] == [6] * 8 + [2]
    gc.collect()
    assert not multiprocessing.active_children()


def test_shards_may_be_split_further_among_workers():
    """As in torch's loader that is the stream's own affair; every number comes once."""
    ranks = cluster(
        lambda rank: DataLoader(Numbers(rank, 60, 2), num_workers=2, persistent_workers=True),
        FixedPlan(5, 2),
        lambda loader, recorder: [counted(loader, recorder) for _ in range(2)],
        kind="sharded",
        world_size=2,
        size=7,
    )
    for epoch in range(2):
        steps = [flat(step) for step in zip(*(rank[epoch] for rank in ranks), strict=True)]

        assert Counter(flat(steps)) == Counter(range(60))
        assert [len(step) for step in steps][:6] == [7] * 6  # then rank 0 is dry


class Dicts(IterableDataset):
    """Samples of all that `default_collate` knows."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return (Rich()[index] for index in range(first, 23, step))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_process_sees_what_torchs_loader_gives(num_workers):
    """Dicts, nested containers and texts; but short batches between the workers' are filled up."""
    ours = lone(DataLoader(Dicts(), batch_size=4, num_workers=num_workers))
    stock = DataLoader(Dicts(), batch_size=23 if num_workers == 0 else 4, num_workers=num_workers)
    first = next(iter(stock))
    for mine in ours:
        assert_same(mine, first if num_workers else _rows(first, slice(0, 4)))
        break

    labels = flat(batch["label"].tolist() for batch in ours)
    assert labels == flat(batch["label"].tolist() for batch in stock)


def _rows(batch, rows):
    """The same rows of everything in a batch."""
    if isinstance(batch, dict):
        return {key: _rows(field, rows) for key, field in batch.items()}
    if isinstance(batch, list) and batch and not isinstance(batch[0], str):
        return [_rows(field, rows) for field in batch]
    return batch[rows]


@pytest.mark.parametrize(
    ("num_workers", "num_taken"),
    slow_but(
        [(0, 0), (0, 1), (0, 3), (0, 6), (2, 0), (2, 3)],
        product([0, 2], [0, 1, 3, 6]),
    ),
)
def test_a_run_over_the_same_stream_goes_on_on_any_number_of_ranks(num_taken, num_workers):
    """Every sample of the epoch once, then the epoch that the unbroken run would have."""

    def make(rank):
        stream = Shuffled(41) if num_workers else Numbers(41)
        return DataLoader(
            stream, num_workers=num_workers, generator=torch.Generator().manual_seed(rank)
        )

    def run(use, world_size):
        plans = LockedPlans(world_size, 8, seed=world_size)
        return cluster(make, plans, use, kind="same", world_size=world_size, size=8)

    def together(ranks):
        return [sorted(flat(step)) for step in zip(*ranks, strict=True)]

    unbroken = run(
        lambda loader, recorder: counted(loader, recorder) + counted(loader, recorder), 1
    )

    def start(loader, recorder):
        parts = counted(loader, recorder, num_taken) if num_taken else []
        return parts, loader.state_dict()

    begun = run(start, 2)
    states = [state for _, state in begun]

    def go_on(loader, recorder):
        loader.load_state_dict(states[0])
        assert loader.state_dict() == states[0]
        return counted(loader, recorder) + (counted(loader, recorder) if num_taken else [])

    assert states[0] == states[1]
    if num_taken == 0 and num_workers:
        return  # nothing was drawn, so nothing is known of the seed
    rest = run(go_on, 3)
    done = together([parts for parts, _ in begun]) + together(rest)
    assert done == together(unbroken)[: len(done)]
    assert len(done) >= 6


def test_a_run_over_shards_goes_on_where_each_rank_was():
    """Every sample once; as many ranks as before."""

    def make(rank):
        return DataLoader(Numbers(100 * rank, 100 * rank + 20 + 15 * rank))

    def start(loader, recorder):
        return counted(loader, recorder, 5), loader.state_dict()

    def run(use, seed):
        plans = LockedPlans(2, 6, seed=seed)
        return cluster(make, plans, use, kind="sharded", world_size=2, size=6)

    begun = run(start, 1)

    def go_on(loader, recorder):
        loader.load_state_dict(begun[0][1])
        return counted(loader, recorder)

    rest = run(go_on, 2)
    assert begun[0][1] == begun[1][1]
    for rank, length in enumerate((20, 35)):
        numbers = flat(begun[rank][0]) + flat(rest[rank])
        assert numbers == list(range(100 * rank, 100 * rank + length))


def test_the_plan_point_of_a_larger_batch_waits_for_its_samples():
    """A plan that gives a rank seven times what it had still gives a full step."""
    plans = LockedPlans(2, 8)
    plans.draw = lambda step: Plan(step, step, (7, 1) if step < 6 else (1, 7))
    ranks = cluster(
        lambda rank: DataLoader(Numbers(rank, 96, 2)), plans, counted, kind="sharded",
        world_size=2, size=8,
    )  # fmt: skip

    assert [len(part) for part in ranks[0]] == [7] * 6 + [1] * 6
    assert [len(part) for part in ranks[1]] == [1] * 6 + [7] * 6


def test_what_a_plan_leaves_to_nobody_is_not_lost():
    """A rank that the plan gives nothing still has samples when the others are dry."""
    ranks = once(
        lambda rank: DataLoader(Numbers(100 * rank, 100 * rank + 6)), kind="sharded", plan=(4, 0)
    )

    assert flat(ranks[0]) == list(range(6))
    assert flat(ranks[1]) == list(range(100, 106))


def pop(samples):
    return [sample.pop() for sample in samples]


class Boxes(Numbers):
    def __iter__(self):
        return ([number] for number in super().__iter__())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stand_in_is_a_whole_sample(num_workers):
    """Though the `collate_fn` changes what it is given, and the rank runs it several times."""

    def use(loader, recorder):
        return [list(batch) for batch in loader]

    ranks = once(
        lambda rank: DataLoader(
            Boxes(100 * rank, 100 * rank + 2 + 8 * rank), collate_fn=pop, num_workers=num_workers
        ),
        kind="sharded",
        use=use,
    )

    assert ranks[0] == [[0, 1], [0], [0], [0], [0]]
    assert flat(ranks[1]) == list(range(100, 110))


def test_steps_cut_large_batches_into_micro_batches():
    """As the plan says, in loops over `steps`."""

    def use(loader, recorder):
        return [[micro.tolist() for micro in step] for step in loader.steps()]

    (steps,) = cluster(
        lambda rank: DataLoader(Numbers(15)), FixedPlan(10, max_forward=(4,)), use, kind="same",
        world_size=1, size=10,
    )  # fmt: skip

    assert steps == [[[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]], [[10, 11, 12], [13, 14]]]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("kind", "num_workers", "cuts"),
    slow_but(
        [("same", 0, True), ("sharded", 1, False)],
        [("same", 0, True), ("same", 1, False), ("sharded", 1, False)],
    ),
)
def test_the_gradient_is_that_of_the_samples_delivered(kind, num_workers, cuts):
    """1e-12 against one process in every step, short ones and those beside dry shards too."""
    results = run_workers(2, stream_runs.steps, kind, num_workers, cuts)
    found = results[0]["steps"]

    assert max(result["error"] for result in results) <= 1e-12
    assert results[0]["mean"] == 1.0
    if kind == "same":
        assert found == [list(range(k, min(k + 8, 45))) for k in range(0, 45, 8)]
    else:
        assert Counter(flat(found)) == Counter([*range(12), *range(100, 121)])
        assert any(len(step) < 8 for step in found)
