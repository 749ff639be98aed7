"""Batch samplers, whose batches are the global ones; and loaders that are used in turn."""

from __future__ import annotations

import random
from itertools import count

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime
from evenstep.torch._data._step import StepCount

from .loader_fakes import FixedPlan, Items, RandomPlans, Ranks, alone, flat

QUIET = Runtime(line_every=None)


class Grouped:
    """Batches of one group each, as by length or by aspect ratio."""

    def __init__(self, size, *, sizes=(), generator=None):
        self.size, self.sizes = size, sizes
        self.generator = generator
        self.epoch = 0

    def __len__(self):
        return 6

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = range(max(len(self.sizes), 6))
        if self.generator:
            order = torch.randperm(6, generator=self.generator).tolist()
        for number in order:
            size = self.sizes[number] if self.sizes else self.size
            yield [100 * self.epoch + 10 * number + k for k in range(size)]


def of(batches):
    return lambda rank: DataLoader(Items(1000), batch_sampler=batches(rank))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_step_is_a_batch_of_the_users_batch_sampler(world_size, num_workers):
    """Whatever the plan: groups stay together; `set_epoch` reaches it."""
    ranks = Ranks(
        lambda rank: DataLoader(Items(1000), batch_sampler=Grouped(7), num_workers=num_workers),
        RandomPlans(world_size, 7),
        world_size=world_size,
        size=7,
    )
    with ranks:
        for epoch in (0, 2):
            for loader in ranks.loaders:
                loader.set_epoch(epoch)
            steps = [sorted(flat(step)) for step in ranks.counted()]

            assert steps == [[100 * epoch + 10 * n + k for k in range(7)] for n in range(6)]
            assert len(ranks.loaders[0]) == 6


@pytest.mark.parametrize("drop_last", [False, True])
def test_torchs_own_batch_sampler_may_end_with_a_short_batch(drop_last):
    """As its own `drop_last` says, over a sampler of the user's; repeats included."""
    weights = [0.1] * 10 + [0.9] * 13

    def batches(rank):
        generator = torch.Generator().manual_seed(4)
        return BatchSampler(WeightedRandomSampler(weights, 23, generator=generator), 5, drop_last)

    expected = list(batches(0))
    ranks = Ranks(of(batches), RandomPlans(2, 5, tail=3), world_size=2, size=5)

    assert [sorted(flat(step)) for step in ranks.counted()] == [sorted(part) for part in expected]


def test_ranks_that_are_seeded_unlike_train_on_rank_0s_batches():
    """The batch sampler runs there alone."""
    ranks = Ranks(
        of(lambda rank: [random.Random(9 * rank + n).sample(range(50), 4) for n in range(5)]),
        FixedPlan(1, 3),
        world_size=2,
        size=4,
    )

    assert [flat(step) for step in ranks.counted()] == [
        random.Random(n).sample(range(50), 4) for n in range(5)
    ]


@pytest.mark.parametrize("inner", [False, True])
def test_a_run_goes_on_within_batches_that_are_drawn(inner):
    """The generator's state is kept: the batch sampler's own, or of the sampler inside it."""

    def batches(seed):
        generator = torch.Generator().manual_seed(seed)
        if inner:
            return BatchSampler(RandomSampler(range(30), generator=generator), 5, False)
        return Grouped(5, generator=generator)

    unbroken = [batch[0].tolist() for batch in alone_with(batches(0))]
    first, second = alone_with(batches(0)), alone_with(batches(9))
    start = []
    for batch in first:
        start.append(batch[0].tolist())
        if len(start) == 2:
            second.load_state_dict(first.state_dict())
            break

    assert start + [batch[0].tolist() for batch in second] == unbroken


def alone_with(batches, size=5):
    return alone(DataLoader(Items(1000), batch_sampler=batches), FixedPlan(size), size=size)


@pytest.mark.parametrize(
    ("batches", "rule"),
    [
        (
            Grouped(5, sizes=(5, 5, 0, 5, 5, 5)),
            "least one sample each, .*, got an empty one as batch 2",
        ),
        (
            Grouped(5, sizes=(5,) * 20),
            "come to an end, .* more than 12 batches .* of length 6. Give",
        ),
        ((), "batches of at least one sample each, and one of them or more, got no batch"),
        (BatchSampler(range(9), 2, False), "batches of 5 samples each, got batches of 2. Give"),
        (
            BatchSampler(DistributedSampler(range(20), 2, 0), 5, False),
            "over a DistributedSampler, which shards. Give",
        ),
        (([k] for k in count()), "more than 1000 batches of a generator without a length. Give"),
    ],
)
def test_batches_that_cannot_be_steps_are_refused(batches, rule):
    """With the rule and the remedy."""
    with pytest.raises(ValueError, match=rule):
        list(alone_with(batches))


def test_whose_batches_they_are_has_to_be_said():
    """Global ones: nothing in a batch sampler tells them from a rank's."""
    loader = DataLoader(Items(30), batch_sampler=Grouped(5))
    with pytest.raises(ValueError, match="given with a `batch_sampler`, whose batches are then"):
        Balancer(runtime=QUIET).prepare(loader)

    assert len(Balancer(5, runtime=QUIET).prepare(loader)) == 6


def numbers(first, last):
    """A stock loader over numbered samples."""
    x = torch.arange(first, last, dtype=torch.float64)
    return DataLoader(TensorDataset(x[:, None]), batch_size=2, drop_last=True)


def in_turn(rank):
    """Return the samples of this rank by loop, and the plans that were seen."""
    found, sizes = [], set()
    with Balancer(policy="tests.torch.plans:Restless", runtime=QUIET) as balancer:
        model = nn.Linear(1, 1).double()
        model, one, other = balancer.prepare(model, numbers(0, 21), numbers(100, 131))
        for loader in (one, other, one, other, other):
            mine = []
            for (x,) in loader:
                model(x).square().mean().backward()
                mine += x[: balancer.num_samples, 0].int().tolist()
                sizes.add(balancer.batch_sizes)
            found.append(mine)
        try:
            balancer.prepare(numbers(0, 20))
        except RuntimeError as error:
            return found, len(sizes), str(error)
    return found, len(sizes), "no error"


@pytest.mark.cluster
def test_loaders_are_used_in_turn():
    """One run, one policy that goes on, each sample of each loop once."""
    ranks = run_workers(2, in_turn)
    loops = [sorted(flat(parts)) for parts in zip(*(found for found, _, _ in ranks), strict=True)]

    one, other = list(range(20)), list(range(100, 128))
    assert loops == [one, other, one, other, other]
    assert ranks[0][1] == 3  # all that four samples allow
    assert "before the first loop" in ranks[0][2]


def test_loaders_cannot_be_mixed_within_a_loop():
    """The step of one would be taken for the other's."""
    count = StepCount()
    one, other = (alone(DataLoader(Items(20), batch_size=4), count=count) for _ in range(2))

    with pytest.raises(RuntimeError, match="loaders take turns"):
        list(zip(one, other, strict=True))
