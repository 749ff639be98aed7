"""A run that goes on in any block of an order: the same samples as if it had not stopped."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from .._tiers import slow_but
from .loader_fakes import FixedPlan, Items, Ranks, alone, flat
from .order_fakes import SAMPLERS, seeded


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("drop_last", slow_but([False], [False, True]))
def test_a_run_goes_on_in_a_later_block(name, drop_last):
    """At every step of two epochs: the rest of the epoch, and the next one of a generator."""

    def make():
        torch.manual_seed(5)
        loader = DataLoader(Items(29), batch_size=4, sampler=SAMPLERS[name](), drop_last=drop_last)
        return alone(loader, block_size=5)

    unbroken, states, generators = make(), [], []
    expected = []
    for _ in range(2):
        for batch in unbroken:
            torch.rand(3)  # as a model with dropout does
            expected.append(batch[0].tolist())
            states.append(unbroken.state_dict())
            generators.append(torch.get_rng_state())
    for taken, state in enumerate(states[:-1], start=1):
        resumed = make()
        torch.set_rng_state(generators[taken - 1])
        resumed.load_state_dict(state)
        rest = []
        for batch in resumed:
            torch.rand(3)
            rest.append(batch[0].tolist())

        assert rest == expected[taken:][: len(rest)]
        assert len(rest) == len(unbroken) - taken % len(unbroken)


def test_a_run_goes_on_with_other_blocks_and_ranks():
    """A state does not depend on how many ranks wrote it, nor on the blocks of who reads it."""

    def make(rank):
        return DataLoader(Items(29), shuffle=True, generator=seeded())

    before = Ranks(make, FixedPlan(3, 1, tail=(1, 0)), world_size=2, size=4, block_size=5)
    steps = before.counted()
    done = [flat(next(steps)) for _ in range(4)]
    steps.close()
    state = before.loaders[1].state_dict()
    for block_size in (1, 3, 5, 8, 1000):
        after = Ranks(
            make, FixedPlan(1, 1, 2, tail=(0, 1, 0)), world_size=3, size=4, block_size=block_size
        )
        for loader in after.loaders:
            loader.load_state_dict(state)

        rest = [flat(step) for step in after.counted()]
        assert sorted(flat(done + rest)) == list(range(29))


def test_another_order_is_refused_where_it_was_trained_on():
    """By the blocks up to there; rank 0 says so, and so do the others."""

    def ranks(order):
        return Ranks(
            lambda rank: DataLoader(Items(29), sampler=order),
            FixedPlan(1, 3, tail=(0, 1)),
            world_size=2,
            size=4,
            block_size=5,
        )

    before = ranks(list(range(29)))
    steps = before.counted()
    for _ in range(3):
        next(steps)
    steps.close()
    after = ranks([*range(9), 10, 9, *range(11, 29)])
    for loader in after.loaders:
        loader.load_state_dict(before.loaders[0].state_dict())
        with pytest.raises(RuntimeError, match="did not draw the order of the checkpoint again"):
            next(iter(loader))
