"""Memory by tokens of a forward: by peaks that are read, and by running out."""

import logging
from itertools import product
from time import sleep

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from evenstep.events import MemoryCapped
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Cost, Runtime

from .._tiers import slow_but
from .cost_runs import (
    BATCH_SIZE,
    LENGTH,
    NUM_SAMPLES,
    Masked,
    Series,
    lengths_in,
    loader_of,
    loss_of,
    num_tokens,
    padded,
)

WORLD_SIZE = 3
FIXED, EACH = 1000, 100  # bytes of a model, and of a token


class Device:
    """Room for so many tokens, a tenth of all memory included that is left free."""

    def __init__(self, room):
        self.peak, self.room = 0, room

    def capacity_bytes(self):
        return FIXED + EACH * self.room

    def peak_bytes(self):
        return self.peak

    def reset(self):
        self.peak = 0

    def hold(self, tokens):
        self.peak = max(self.peak, FIXED + EACH * tokens)


def tokens_of(batch, *, pads):
    """What a forward has of them: with those of padding, or without."""
    mask = batch[2]
    return mask.numel() if pads else int(num_tokens(batch))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("cuts", "pads"), slow_but([(True, False), (False, True)], product((False, True), repeat=2))
)
def test_a_fast_rank_gets_no_more_than_fits(cuts, pads):
    """Its speed asks for twice as much: in several forwards, or, in a plain loop, by others."""
    room = 500 if pads else 380
    cost = Cost(LENGTH, padded=pads)
    found = run_workers(WORLD_SIZE, _measured, cost, room, cuts, timeout_s=120)

    for largest, _, _, _ in found:
        assert max(largest) <= room
    fast = found[0]
    assert max(fast[2]) > 1 or not cuts
    assert np.median(fast[1][14:]) > 1.15 * LENGTH.mean() * BATCH_SIZE / WORLD_SIZE
    assert {unit for *_, told in found[:1] for unit in told} == {"size"}


@pytest.mark.cluster
def test_lengths_seen_in_batches_bound_later_epochs():
    """By tokens, as where they are known ahead, some steps after the second one has begun."""
    cost = Cost(from_batch=lengths_in, padded=False)
    found = run_workers(WORLD_SIZE, _measured, cost, 380, True, timeout_s=120)

    third = 2 * len(found[0][0]) // 5  # no step waits for plans by cost: how many go by count
    assert max(max(largest[third:]) for largest, *_ in found) <= 380
    assert max(found[0][2][third:]) > 1  # or memory did not matter


def _measured(rank, cost, room, cuts):
    device, events = Device(room), []
    largest, own, forwards = [], [], []
    runtime = Runtime(line_every=None, memory=device, hooks=(events.append,))
    with Balancer(cost=cost, runtime=runtime) as balancer:
        model, loader = balancer.prepare(Masked(), loader_of(WORLD_SIZE))
        for _ in range(5):
            for step in loader.steps() if cuts else ([batch] for batch in loader):
                had = []
                for batch in step:
                    if not balancer.num_samples:
                        loss_of(model, batch, tokens=False).backward()
                        continue
                    tokens = tokens_of(batch, pads=cost.padded)
                    device.hold(tokens)
                    had.append(tokens)
                    sleep(tokens * (5e-5 if rank == 0 else 2e-4))
                    loss_of(model, batch, tokens=False).backward()
                largest.append(max(had, default=0))
                own.append(sum(had))
                forwards.append(len(had))
    return largest, own, forwards, [e.unit for e in events if isinstance(e, MemoryCapped)]


@pytest.mark.cluster
@pytest.mark.parametrize("pads", slow_but([True], [False, True]))
def test_what_runs_out_of_memory_is_cut_by_tokens(pads):
    """The parameters of one process, and a cap in tokens from then on, on all ranks."""
    alone = run_workers(1, _ran_out, 10**6, pads)[0]
    found = run_workers(WORLD_SIZE, _ran_out, 150, pads, timeout_s=120)

    for parameters, _, caps in found:
        assert (parameters - alone[0]).norm() <= 1e-12 * alone[0].norm()
        assert caps == found[0][2]
        assert caps[0] <= 150
    assert 1 <= sum(tokens > 150 for tokens in found[0][1]) <= 2


def _ran_out(rank, most, pads):
    tried = []

    def closure(batch):
        tried.append(tokens_of(batch, pads=pads))
        if rank == 0 and tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_of(net, batch, tokens=False)

    with Balancer(cost=Cost(LENGTH, padded=pads), runtime=Runtime(line_every=None)) as balancer:
        model = Masked()
        world_size = WORLD_SIZE if most < 10**6 else 1
        net, loader = balancer.prepare(model, loader_of(world_size))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in loader.steps():
            optimizer.zero_grad()
            step.backward(closure)
            optimizer.step()
        caps = balancer._session.steps.plan.max_forward
    return torch.cat([p.detach().flatten() for p in model.parameters()]), tried, caps


def test_a_plain_loop_whose_samples_fit_nowhere_says_so(caplog):
    """Once, with the remedy; it is computed all the same."""
    device, seen = Device(400), []
    stock = DataLoader(Series(np.full(NUM_SAMPLES, 30)), batch_size=12, collate_fn=padded)
    cost = Cost(np.where(np.arange(NUM_SAMPLES) < 36, 30, 60), padded=False)
    with (
        caplog.at_level(logging.WARNING, "evenstep"),
        Balancer(cost=cost, runtime=Runtime(line_every=None, memory=device)) as balancer,
    ):
        model, loader = balancer.prepare(Masked(), stock)
        for batch in loader:
            device.hold(360)
            loss_of(model, batch, tokens=False).backward()
            seen += batch[0].tolist()

    (told,) = [one.getMessage() for one in caplog.records if "known to fit" in one.getMessage()]
    assert "rank 0 has a size of 720" in told
    assert "`loader.steps()`" in told
    assert sorted(seen) == list(range(NUM_SAMPLES))
