"""Lengths that become known as samples are read: one table on all ranks, through restarts too."""

from itertools import product
from queue import Queue
from threading import Thread

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep._planner import UNKNOWN, Plan, PlanCosts, SampleCosts
from evenstep.events import Rebalanced
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Cost, Runtime
from evenstep.torch._data.deal._by_cost import CostDeal

from .._tiers import slow_but
from .cost_runs import BATCH_SIZE, LENGTH, NUM_SAMPLES, Masked, lengths_in, loader_of, loss_of

COST = Cost(from_batch=lengths_in)
NUM_STEPS = -(-NUM_SAMPLES // BATCH_SIZE)


def test_unknown_lengths_count_as_the_mean_and_later_ones_as_no_more_than_twice_the_longest():
    """Plans that are on their way are rounded by the longest."""
    costs = SampleCosts(COST, np.full(4, UNKNOWN, np.int32))
    before = costs.features(np.arange(4))
    costs.correct(np.array([0, 1]), np.array([10, 30]))
    first = costs.features(np.arange(4))
    costs.correct(np.array([2]), np.array([100]))

    assert before.tolist() == [[1, 1, 1]] * 4
    assert first[:, 1].tolist() == [10, 30, 20, 20]
    assert costs.features(np.array([2]))[0, 1] == costs.most[1] == 60


def test_a_step_planned_before_lengths_were_known_goes_by_them():
    """As the first of the second epoch does; a worker of half the speed gets half of them."""
    lengths = np.random.default_rng(0).integers(1, 1000, 64)
    costs = SampleCosts(Cost(from_batch=lengths_in, padded=False), lengths.astype(np.int32))
    by_count = PlanCosts(slope=((1 << 40, 0, 0), (1 << 41, 0, 0)), intercept=(0, 0), knows=False)
    parts = []
    for rank in range(2):
        deal = CostDeal(costs, rank=rank, world_size=2)
        deal.begin(lambda first, num: np.arange(first, first + num), equal_forwards=False)
        parts.append(np.concatenate(deal.parts(Plan(0, 0, (43, 21), costs=by_count), 0, 64)))
    fast, slow = (int(lengths[part].sum()) for part in parts)

    assert sorted(np.concatenate(parts)) == list(range(64))
    assert fast / slow == pytest.approx(2, rel=0.02)


def _ahead(batches):
    """Yield batches that a thread has fetched ahead."""
    queue = Queue(maxsize=2)

    def fetch():
        for batch in batches:
            queue.put(batch)
        queue.put(None)

    thread = Thread(target=fetch, daemon=True)
    thread.start()
    while (batch := queue.get()) is not None:
        yield batch
    thread.join()


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("workers", "ahead"), slow_but([(1, True)], product([0, 1], [False, True]))
)
def test_the_second_epoch_goes_by_cost(workers, ahead):
    """Each sample once an epoch, one table that is right, and the parameters of one process."""
    found = run_workers(3, _two_epochs, 3, workers, ahead, timeout_s=120)
    ((alone, _, _, _),) = run_workers(1, _two_epochs, 1, 0, False, timeout_s=120)

    for parameters, _, table, _ in found:
        assert (parameters - alone).norm() <= 1e-12 * alone.norm()
        assert np.array_equal(table, LENGTH)
    for epoch in range(2):
        seen = [index for _, indices, _, _ in found for index in indices[epoch]]
        assert sorted(seen) == list(range(NUM_SAMPLES))
    plans = found[0][3]
    assert any(reason.startswith("by cost, speeds") for _, reason in plans)
    for step, reason in plans:
        assert reason.startswith("by count") or step >= NUM_STEPS


def _two_epochs(rank, world_size, workers, ahead):
    events = []
    runtime = Runtime(line_every=None, hooks=(events.append,))
    with Balancer(cost=COST if world_size > 1 else None, runtime=runtime) as balancer:
        model, loader = balancer.prepare(Masked(), loader_of(world_size, workers=workers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        seen = []
        for _ in range(2):
            seen.append([])
            for batch in _ahead(loader) if ahead else loader:
                loss_of(model, batch, tokens=False).backward()
                seen[-1] += batch[0].tolist() if balancer.num_samples else []
                optimizer.step()
                optimizer.zero_grad()
        next(iter(loader))  # the begin of the third, so that all have told what they saw
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    table = None if loader.costs is None else loader.costs.lengths
    plans = [(event.step, event.reason) for event in events if isinstance(event, Rebalanced)]
    return values, seen, table, plans


@pytest.mark.cluster
def test_another_number_of_ranks_goes_on_with_the_lengths():
    """A state of three ranks, in their second epoch, has what two know from the first step on."""
    states = run_workers(3, _state_of_second, timeout_s=120)
    found = run_workers(2, _resumed, states[0], timeout_s=120)

    assert all(state == states[0] for state in states)
    for table, seen in found:
        assert np.array_equal(table, LENGTH)
        assert len(set(seen)) == len(seen)
    assert sum(len(seen) for _, seen in found) == NUM_SAMPLES - 2 * BATCH_SIZE


def _state_of_second(rank):
    with Balancer(cost=COST, runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(Masked(), loader_of(3))
        for batch in loader:
            loss_of(model, batch, tokens=False).backward()
        for number, batch in enumerate(loader):
            loss_of(model, batch, tokens=False).backward()
            if number == 1:
                return loader.state_dict()


def _resumed(rank, state):
    with Balancer(cost=COST, runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(Masked(), loader_of(2))
        loader.load_state_dict(state)
        assert loader.state_dict()["lengths"] == state["lengths"]
        seen = []
        for batch in loader:
            table = loader.costs.lengths.copy()
            seen += batch[0].tolist() if balancer.num_samples else []
            loss_of(model, batch, tokens=False).backward()
    return table, seen


def test_a_state_without_lengths_is_taken():
    """Of a run that knew them before, say: plans count until they are known."""
    with Balancer(cost=LENGTH[:8], runtime=Runtime(line_every=None)) as balancer:
        _, loader = balancer.prepare(nn.Linear(1, 1), _eight())
        state = loader.state_dict()
    with Balancer(cost=Cost(from_batch=_ones), runtime=Runtime(line_every=None)) as balancer:
        _, loader = balancer.prepare(nn.Linear(1, 1), _eight())
        loader.load_state_dict(state)

        assert next(iter(loader))[0].shape == (2, 1)
        assert not loader.costs.is_known


def _eight():
    return DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=2)


def _ones(samples, batch):
    return [1] * len(samples)
