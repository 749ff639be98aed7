"""Global batches of any size: a step is a batch, each sample counts once, the gradient is exact."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from evenstep.testing import run_workers
from evenstep.torch import Balancer, Bounds, Cost

from .._tiers import Groups, slow_but
from .budget_runs import QUIET, TokenBudget, alone, train
from .cost_runs import LENGTH, NUM_SAMPLES, lengths_in
from .loader_fakes import FixedPlan, Items, RandomPlans, Ranks, flat
from .loader_fakes import alone as one_rank

LOOPS = {
    "plain": {},
    "steps, two loader workers": {"kind": "steps", "workers": 2},
    "steps in forwards of 3": {"kind": "steps", "bounds": Bounds(max=3)},
    "mean over tokens": {"tokens": True},
    "FSDP2, mean over tokens": {"tokens": True, "kind": "fsdp2"},
    "FSDP2": {"kind": "fsdp2"},
    "FSDP2 in forwards of 3": {"tokens": True, "kind": "fsdp2", "bounds": Bounds(max=3)},
}
COSTS = {
    "counted": None,
    "additive": Cost(LENGTH, padded=False),
    "padded": Cost(LENGTH, padded=True),
    "lengths seen in batches": Cost(from_batch=lengths_in),
}
RUNS = [pair for pair in product(LOOPS, COSTS) if "forwards" not in pair[0] or pair[1] == "counted"]
FIRST = [
    ("plain", "counted"),
    ("steps, two loader workers", "padded"),
    ("steps in forwards of 3", "counted"),
    ("mean over tokens", "additive"),
    ("FSDP2 in forwards of 3", "counted"),
]


@pytest.fixture(scope="module")
def trained():
    """What each of three ranks found by a loop and a cost."""

    def run(cases):
        ranks = run_workers(3, _train_all, cases, timeout_s=200)
        return dict(zip(cases, zip(*ranks, strict=True), strict=True))

    return Groups(FIRST, RUNS, run)


def _train_all(rank, cases):
    return [train(rank, COSTS[cost], **LOOPS[loop]) for loop, cost in cases]


@pytest.mark.cluster
@pytest.mark.parametrize(("loop", "cost"), slow_but(FIRST, RUNS))
def test_training_by_a_token_budget_is_that_of_plain_torch(trained, loop, cost):
    """Parameters after two epochs within 1e-12, each sample once in each, as plans change."""
    found = trained[loop, cost]
    parameters, steps, _ = alone(2, tokens="tokens" in LOOPS[loop])

    assert len({len(step) for step in steps}) > 5
    for own, seen, _ in found:
        assert len(seen) == len(steps)
        assert (own - parameters).norm() <= 1e-12 * parameters.norm()
    for step, samples in enumerate(steps):
        assert sorted(index for one in found for index in one[1][step]) == sorted(samples)
    assert found[0][2] or "FSDP2" in loop


@pytest.mark.cluster
@pytest.mark.parametrize("cost", slow_but(["counted"], ["counted", "additive"]))
def test_a_run_by_batches_goes_on_with_other_ranks(tmp_path, cost):
    """Three ranks, broken off in an epoch, then two: by the states of a generator."""
    begun = {"folder": tmp_path, "stop_after": 4}
    before = run_workers(3, _train, COSTS[cost], begun)
    rest = {"folder": tmp_path, "world_size": 2, "workers": 1, "epochs": 1}
    after = run_workers(2, _train, COSTS[cost], rest)
    parameters, steps, _ = alone(1, tokens=False, batches=drawing())

    parts = [zip(*(seen for _, seen, _ in found), strict=True) for found in (before, after)]
    assert [sorted(flat(step)) for step in flat(parts)] == [sorted(step) for step in steps]
    assert (after[0][0] - parameters).norm() <= 1e-12 * parameters.norm()


def _train(rank, cost, settings):
    return train(rank, cost, batches=drawing(), **settings)


def drawing():
    return TokenBudget(generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("block_size", [5, 1000])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_step_is_a_batch_of_any_size(world_size, num_workers, block_size):
    """Smaller than the number of ranks too, in epochs of other batches, under any plans."""

    def make(rank):
        return DataLoader(Items(NUM_SAMPLES), batch_sampler=TokenBudget(), num_workers=num_workers)

    plans = RandomPlans(world_size, 20)
    with Ranks(make, plans, world_size=world_size, size=20, block_size=block_size) as ranks:
        for epoch in (0, 3):
            for loader in ranks.loaders:
                loader.set_epoch(epoch)
            sampler = TokenBudget()
            sampler.set_epoch(epoch)
            steps = []
            for step in ranks.counted():
                steps.append(sorted(flat(step)))
                states = [loader.state_dict() for loader in ranks.loaders]
                assert all(state == states[0] for state in states)

            assert steps == [sorted(batch) for batch in sampler]
            assert sorted(flat(steps)) == list(range(NUM_SAMPLES))
            assert len(ranks.loaders[0]) == len(steps)


@pytest.mark.parametrize("taken", [1, 3, 100])
def test_an_epoch_of_batches_goes_on_at_any_step(taken):
    """Inside of an epoch, and after it: by the state of a generator, as in torch's own loader."""

    def loader():
        items = DataLoader(Items(NUM_SAMPLES), batch_sampler=drawing())
        return one_rank(items, FixedPlan(20), size=20, block_size=50)

    unbroken = loader()
    expected = [batch[0].tolist() for _ in range(3) for batch in unbroken]
    first, second = loader(), loader()
    seen = []
    for _, batch in zip(range(taken), first, strict=False):
        seen.append(batch[0].tolist())
    second.load_state_dict(first.state_dict())
    while len(seen) < len(expected):
        seen += [batch[0].tolist() for batch in second]

    assert seen == expected


def test_a_batch_beyond_the_planned_size_keeps_to_the_caps(caplog):
    """In one forward on each rank; what is over the cap of one, another one takes.

    Where caps that were measured leave no way, the run goes on, and says so once.
    """
    batches = [range(40), range(10), range(90), range(99)]
    ranks = Ranks(
        lambda rank: DataLoader(Items(99), batch_sampler=batches),
        FixedPlan(10, 10, 10, max_forward=(12, 60, 9)),
        world_size=3,
        size=30,
    )

    sizes = [[len(part) for part in step] for step in ranks.counted()]
    assert sizes == [[12, 19, 9], [4, 3, 3], [30, 30, 30], [33, 33, 33]]
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == len(ranks.loaders)
    assert "90 samples, and 81 are known to fit" in said[0]


def test_steps_that_are_skipped_are_counted_when_batches_are_known():
    """Those are drawn at the begin of the epoch."""
    loader = one_rank(DataLoader(Items(9), batch_sampler=[[0], [1, 2]]), FixedPlan(2), size=2)
    loader.skip(1)
    assert [batch[0].tolist() for batch in loader] == [[1, 2]]

    loader.skip(2)
    with pytest.raises(ValueError, match="less than the epoch's 2 steps, got 2"):
        next(iter(loader))


def test_a_state_of_batches_fits_no_other_order():
    """Which cuts its steps by counting."""
    batches = one_rank(DataLoader(Items(9), batch_sampler=[[0], [1, 2]]), FixedPlan(2), size=2)
    counted = one_rank(DataLoader(Items(9), batch_size=2))
    list(batches)

    with pytest.raises(ValueError, match="one of the kind 'batches', not 'order'"):
        counted.load_state_dict(batches.state_dict())


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        (Bounds(max=4), r"`Bounds\(max=...\)` must add up to the largest batch, "),
        (Bounds(granularity=2), r"`Bounds\(min=.*as no split of a small batch"),
        (Bounds(min=2), r"`Bounds\(min=.*as no split of a small batch"),
    ],
)
def test_what_needs_batches_of_one_size_is_refused(bounds, words):
    """With batches that differ; and with those that do not, it is as it was."""
    for batches, is_refused in (([[0, 1, 2, 3], [4, 5, 6, 7]], False), ([[0], range(5)], True)):
        with Balancer(4, bounds=bounds, runtime=QUIET) as balancer:
            loader = DataLoader(torch.zeros(9, 1), batch_sampler=batches)
            _, loader = balancer.prepare(nn.Linear(1, 1), loader)
            if is_refused:
                with pytest.raises(ValueError, match=words):
                    next(iter(loader))
            else:
                next(iter(loader))
