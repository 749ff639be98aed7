"""Orders in blocks: as if they were drawn as a whole, of any length, and resumed in any block."""

from __future__ import annotations

import weakref
import zlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
)

from evenstep.torch._data.order._drawing import OrderBlocks

from .loader_fakes import FixedPlan, Items, RandomPlans, Ranks, alone, flat
from .order_fakes import SAMPLERS, Drawing, Endless, Sized, indices_of, seeded


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_one_process_sees_torchs_order_in_blocks(name, drop_last):
    """With the same generators, for several epochs, wherever blocks end."""

    def make():
        torch.manual_seed(5)
        sampler = SAMPLERS[name]()
        return DataLoader(Items(29), batch_size=4, sampler=sampler, drop_last=drop_last)

    stock = make()
    expected = [indices_of(stock) for _ in range(3)]
    after = torch.get_rng_state()
    for block_size in (3, 4, 5, 1000):
        ours = alone(make(), block_size=block_size)

        assert [indices_of(ours) for _ in range(3)] == expected
        assert torch.equal(torch.get_rng_state(), after)


def test_a_shared_generator_seeds_workers_and_order_as_in_torchs_loader():
    """The loader's own generator is drawn from at the same places, to the end of the epoch."""

    def make():
        return DataLoader(Items(29), batch_size=4, shuffle=True, generator=seeded())

    stock, ours = make(), alone(make(), block_size=5)

    for _ in range(3):
        assert indices_of(ours) == indices_of(stock)


def test_global_batches_are_taken_in_blocks():
    """A batch sampler's order as well."""
    batches = BatchSampler(RandomSampler(range(29), generator=seeded()), 4, drop_last=False)
    expected = list(BatchSampler(RandomSampler(range(29), generator=seeded()), 4, drop_last=False))
    ours = alone_with_batches(batches, block_size=5)

    assert indices_of(ours) == expected


def alone_with_batches(batches, **options):
    return Ranks(
        lambda rank: DataLoader(Items(29), batch_sampler=batches),
        FixedPlan(4, tail=(1,)),
        world_size=1,
        size=4,
        **options,
    ).loaders[0]


@pytest.mark.parametrize("block_size", [3, 5, 1000])
def test_all_ranks_train_on_one_order_however_it_is_cut_into_blocks(block_size):
    """Step k has positions kB to (k+1)B, whatever the plans, the blocks and loader workers."""

    def make(rank):
        return DataLoader(
            Items(29),
            sampler=RandomSampler(range(29), generator=seeded()),
            num_workers=rank,
            multiprocessing_context="fork" if rank else None,
        )

    order = list(RandomSampler(range(29), generator=seeded()))
    plans = RandomPlans(3, 4, tail=1)
    with Ranks(make, plans, world_size=3, size=4, block_size=block_size) as ranks:
        for number, step in enumerate(ranks.counted()):
            assert sorted(flat(step)) == sorted(order[4 * number : 4 * number + 4])
            states = [loader.state_dict() for loader in ranks.loaders]
            assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_is_taken_apart_in_blocks(shuffle):
    """Its order is that of one replica."""
    sampler = DistributedSampler(range(29), 2, 0, shuffle=shuffle, seed=7)
    expected = list(DistributedSampler(range(29), 1, 0, shuffle=shuffle, seed=7))
    ranks = Ranks(
        lambda rank: DataLoader(Items(29), sampler=sampler),
        FixedPlan(1, 3, tail=(0, 1)),
        world_size=2,
        size=4,
        block_size=5,
    )

    steps = [flat(step) for step in ranks.counted()]
    assert [sorted(step) for step in steps] == [
        sorted(expected[first : first + 4]) for first in range(0, 29, 4)
    ]


def test_an_order_is_drawn_only_as_far_as_training_comes_near():
    """The first batch of an order of a billion needs no more than the next steps do."""
    sampler = Drawing(10**9)
    loader = alone(DataLoader(Items(29), batch_size=4, sampler=sampler), block_size=20)
    steps = iter(loader)
    for number in range(1, 50):
        next(steps)
        assert sampler.num_drawn <= 4 * number + 4 + 2 * 20
    steps.close()


def test_an_order_that_was_trained_on_is_forgotten():
    """However long the epoch is, no more than the blocks around a step are kept."""
    shared = []

    def share(key, values):
        shared.append(weakref.ref(values))
        return values

    sampler = RandomSampler(range(29), replacement=True, num_samples=10**9)
    loader = alone(DataLoader(Items(29), batch_size=4, sampler=sampler), share=share, block_size=8)
    for _ in zip(range(100), loader, strict=False):
        assert sum(values() is not None for values in shared) <= 5
    assert len(shared) > 50


def test_an_endless_sampler_goes_on_for_ever():
    """It has no length, as with torch's loader, and a state like any other's."""

    def make():
        return alone_endless(Endless())

    loader, resumed = make(), make()
    with pytest.raises(TypeError, match="endless Endless has no length"):
        len(loader)
    batches = [batch[0].tolist() for _, batch in zip(range(50), loader, strict=False)]
    assert flat(batches) == [number % 29 for number in range(200)]

    resumed.load_state_dict(loader.state_dict())
    assert next(iter(resumed))[0].tolist() == [number % 29 for number in range(200, 204)]


def test_a_sampler_without_a_length_that_ends_is_refused_then():
    """Nobody could plan its last step."""
    loader = alone_endless(Endless(30))

    with pytest.raises(ValueError, match=r"have a length, or go on .* ended after 30\. Give it a"):
        list(loader)


def alone_endless(sampler):
    return Ranks(
        lambda rank: DataLoader(Items(29), batch_size=4, sampler=sampler),
        FixedPlan(4),
        world_size=1,
        size=4,
        block_size=8,
    ).loaders[0]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    start=st.integers(0, 9),
    data=st.data(),
)
def test_blocks_hold_what_is_ahead_and_drop_the_rest(sizes, start, data):
    """Positions ahead of the newest one are there, with checksums of whole blocks."""
    end = start + sum(sizes)
    order = np.random.default_rng(0).integers(0, 99, end)
    blocks = OrderBlocks(start, zlib.crc32(order[:start].tobytes()))
    ends = np.cumsum([start, *sizes]).tolist()
    position = data.draw(st.integers(start, end - 1))
    for first, last in pairwise(ends):
        assert blocks.indices(first, 1) is None
        blocks.append(order[first:last], position)
    first = data.draw(st.integers(position, end - 1))
    num = data.draw(st.integers(1, end - first))

    assert np.array_equal(blocks.indices(first, num), order[first : first + num])
    covered, checksum = blocks.checksum(position)
    assert covered == min(one for one in ends if one >= max(position, 1))
    assert checksum == zlib.crc32(order[:covered].tobytes())
    assert blocks.end == end


@pytest.mark.parametrize(
    ("sampler", "rule"),
    [
        (Sized(range(21), 29), "as many indices as its length says, 29, got 21"),
        (Sized(range(40), 29), "as many indices as its length says, 29, got more"),
        (Sized([*range(20), "x", *range(8)], 29), "yield integers, got 'x'"),
    ],
)
def test_a_sampler_that_goes_wrong_later_is_refused_then_on_all_ranks(sampler, rule):
    """At the block where it shows, with the rule, and with rank 0's words elsewhere."""
    ranks = Ranks(
        lambda rank: DataLoader(Items(29), sampler=sampler),
        FixedPlan(1, 3, tail=(0, 1)),
        world_size=2,
        size=4,
        block_size=5,
    )
    mine, other = map(iter, ranks.loaders)
    done: list[object] = []
    with pytest.raises(ValueError, match=rule):
        done.extend(mine)
    assert done
    for _ in done:
        next(other)
    with pytest.raises(RuntimeError, match=f"failed on rank 0: ValueError: .*{rule}"):
        next(other)


def test_what_the_model_draws_does_not_disturb_a_sampler_that_draws_as_it_goes():
    """Its order is the one it would draw as a whole, and its next epoch repeats none of it."""

    def orders(noisy):
        torch.manual_seed(1)
        loader = alone(DataLoader(Items(29), batch_size=4, sampler=Drawing(40)), block_size=8)
        for _ in range(2):
            order = []
            for batch in loader:
                if noisy:
                    torch.rand(1)
                order += batch[0].tolist()
            yield order

    quiet, noisy = list(orders(False)), list(orders(True))

    assert noisy[0] == quiet[0]
    following = ",".join(map(str, noisy[1][:8]))
    assert following not in ",".join(map(str, noisy[0]))
