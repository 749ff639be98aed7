"""Which samples are trained on: each once, in one order, whatever plans and ranks there are."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .loader_fakes import FixedPlan, Items, RandomPlans, Ranks, Rich, alone, flat


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@given(
    length=st.integers(1, 60),
    size=st.integers(1, 20),
    world_size=st.integers(1, 5),
    drop_last=st.booleans(),
    seed=st.integers(0, 9),
)
def test_every_sample_is_read_once_an_epoch(length, size, world_size, drop_last, seed):
    """Over all ranks, with another plan at every step; the short last step included."""
    if drop_last and length < size:
        return
    kept = length - length % size if drop_last else length
    plans = RandomPlans(world_size, size, tail=kept % size, seed=seed)
    ranks = Ranks(
        lambda rank: DataLoader(Items(length), shuffle=True, drop_last=drop_last),
        plans,
        world_size=world_size,
        size=size,
    )
    for epoch in range(2):
        steps = list(ranks.counted())
        seen = Counter(index for step in steps for part in step for index in part)

        assert len(steps) == len(ranks.loaders[0]) == -(-kept // size)
        assert set(seen.values()) == {1}
        assert len(seen) == kept
        for number, step in enumerate(steps):
            plan = plans.plans[epoch * len(steps) + number]
            short = (number + 1) * size > kept
            assert tuple(map(len, step)) == (plan.tail if short else plan.batch_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_trains_on_the_same_samples_under_any_plan(world_size):
    """Step k has positions kB to (k+1)B of the order that the sampler gives by itself."""
    plans = RandomPlans(world_size, 8, tail=5)
    ranks = Ranks(
        lambda rank: DataLoader(Items(37), sampler=RandomSampler(range(37), generator=seeded())),
        plans,
        world_size=world_size,
        size=8,
    )
    order = list(RandomSampler(range(37), generator=seeded()))
    for number, step in enumerate(ranks.counted()):
        assert sorted(flat(step)) == sorted(order[8 * number : 8 * number + 8])
        for part in step:
            assert part == [index for index in order if index in part]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_process_sees_what_torchs_loader_gives(num_workers):
    """With the same generators: order, batches and their types, for several epochs."""

    def make(seed):
        return DataLoader(
            Rich(), batch_size=4, shuffle=True, generator=seeded(seed), num_workers=num_workers
        )

    ours = alone(make(3))
    stock = make(3)
    for _ in range(2):
        for mine, theirs in zip(ours, stock, strict=True):
            assert_same(mine, theirs)


def test_without_a_generator_torchs_own_decides():
    """`torch.manual_seed` gives the order that it gives torch's loader."""
    torch.manual_seed(5)
    expected = [batch[0].tolist() for batch in DataLoader(Items(20), batch_size=4, shuffle=True)]

    torch.manual_seed(5)
    got = [batch[0].tolist() for batch in alone(DataLoader(Items(20), batch_size=4, shuffle=True))]

    assert got == expected


def test_ranks_draw_alike_from_torchs_generator():
    """Rank 0 draws the order; the others' generators move on by as much."""
    states = []
    ranks = Ranks(
        lambda rank: DataLoader(Items(8), shuffle=True), FixedPlan(4, 4), world_size=2, size=8
    )
    for loader in ranks.loaders:
        torch.manual_seed(1)
        next(iter(loader))
        states.append(torch.get_rng_state())

    assert torch.equal(*states)


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(range(30)),
        WeightedRandomSampler([0.1] * 10 + [0.9] * 20, 30, generator=seeded()),
        SubsetRandomSampler(range(5, 20), generator=seeded()),
        [3, 1, 4, 1, 5],
    ],
    ids=["sequential", "weighted", "subset", "list"],
)
def test_any_sampler_with_a_length_is_kept(sampler):
    """What it yields is what all ranks together train on, repeats included."""
    own = getattr(sampler, "generator", None)
    before = own and own.get_state()
    expected = list(sampler)
    if own:
        own.set_state(before)
    ranks = Ranks(
        lambda rank: DataLoader(Items(30), sampler=sampler),
        RandomPlans(2, 4, tail=len(expected) % 4),
        world_size=2,
        size=4,
    )

    assert Counter(flat(map(flat, ranks.counted()))) == Counter(expected)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_is_taken_apart(shuffle):
    """Its shuffle, seed and epoch count; its shards and its repeats do not."""

    def make(rank):
        sampler = DistributedSampler(range(31), 3, rank, shuffle=shuffle, seed=7)
        return DataLoader(Items(31), sampler=sampler)

    ranks = Ranks(make, FixedPlan(2, 1, 3, tail=(0, 1, 0)), world_size=3, size=6)
    orders = []
    for epoch in (0, 4):
        for loader in ranks.loaders:
            loader.set_epoch(epoch)
        orders.append(flat(map(flat, ranks.counted())))

        assert sorted(orders[-1]) == list(range(31))
    assert (orders[0] != orders[1]) == shuffle


def test_set_epoch_on_the_users_sampler_counts():
    """As in plain DDP scripts, which keep hold of the sampler."""
    sampler = DistributedSampler(range(12), 1, 0)
    loader = alone(DataLoader(Items(12), batch_size=4, sampler=sampler))
    first = [batch[0].tolist() for batch in loader]
    again = [batch[0].tolist() for batch in loader]
    sampler.set_epoch(1)

    assert first == again
    assert [batch[0].tolist() for batch in loader] != first


def test_the_sampler_runs_on_rank_0_only():
    """Ranks that would draw differently train on rank 0's order."""

    def make(rank):
        shuffled = random.Random(rank).sample(range(10), 10)
        return DataLoader(Items(10), sampler=shuffled)

    ranks = Ranks(make, FixedPlan(3, 2), world_size=2, size=5)

    assert [flat(step) for step in ranks.counted()] == [
        random.Random(0).sample(range(10), 10)[k : k + 5] for k in (0, 5)
    ]


def assert_same(mine, theirs):
    """Compare two batches, types included."""
    assert type(mine) is type(theirs)
    if isinstance(mine, torch.Tensor):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    elif isinstance(mine, dict):
        assert list(mine) == list(theirs)
        for key in mine:
            assert_same(mine[key], theirs[key])
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
    else:
        assert mine == theirs
