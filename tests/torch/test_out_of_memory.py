"""A worker that runs out of memory loses no sample, and the result is that of one process."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import Fixed
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Bounds, Runtime

from .._tiers import slow_but
from .models import WithBuffers
from .plans import Restless

B, NUM_STEPS, WORLD_SIZE = 48, 8, 3
QUIET = Runtime(line_every=None)


def samples():
    """Return features, targets, and each sample's own number."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B * NUM_STEPS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(5, (len(x),), generator=generator), torch.arange(len(x)))


def alone():
    """Return the parameters that one process has after the epoch, with torch's own loader."""
    model, optimizer = _fresh()
    for x, y, _ in DataLoader(samples(), batch_size=B):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train(rank, where, most, *, bounds=None, sizes=None):
    """Return parameters, the samples that counted here, forward sizes and caps after an epoch.

    Rank 0 holds ``most`` samples in the ``"forward"``, or breaks off in the ``"backward"`` of the
    first forward that has more. ``"inside"`` and ``"straight"`` fail once at a size that went well
    before, the fourth forward of ``most``: inside the model, or past it.
    """
    model, optimizer = _fresh()
    loader = DataLoader(samples(), batch_size=B // WORLD_SIZE)
    policy = Restless() if sizes is None else Fixed(sizes)
    seen, tried = [], []
    fails = Failures(where if rank == 0 else None, most, tried)
    with Balancer(B, policy=policy, bounds=bounds or Bounds(), runtime=QUIET) as balancer:
        net, loader = balancer.prepare(DistributedDataParallel(model), loader)

        def closure(batch):
            x, y, _ = batch
            tried.append(len(x))
            fails.at("forward")
            with fails.inside(model.inner):
                loss = nn.functional.cross_entropy(net(x), y)
            fails.at("late")
            fails.at("straight")
            return loss

        def through(loss):
            fails.at("backward", model)
            loss.backward()

        for step in loader.steps():
            step.backward(closure, through=through)
            seen += [
                int(n) for part in step.micro_batches if part.num_samples for n in part.batch[2]
            ]
            optimizer.step()
            optimizer.zero_grad()
        plan = balancer._session.steps.plan
        caps = None if plan.max_forward is None else plan.max_forward[0]
    return [p.detach() for p in model.parameters()], seen, tried, caps


class Failures:
    """Raises torch's error at one place of a step; nowhere where ``where`` is None."""

    def __init__(self, where, most, tried):
        self.where, self.most, self.tried, self.broken = where, most, tried, False

    def at(self, place, model=None):
        if place == self.where and self._is_due(place):
            self.broken = True
            if model is not None:  # in the middle of the backward
                list(model.parameters())[-1].grad = torch.ones(5, dtype=torch.float64)
            raise torch.OutOfMemoryError("CUDA out of memory")

    @contextmanager
    def inside(self, layer):
        """Have ``layer`` fail if the place is the middle of the model's forward."""
        handle = layer.register_forward_hook(lambda *_: self.at("inside"))
        try:
            yield
        finally:
            handle.remove()

    def _is_due(self, place):
        if place in ("inside", "straight"):
            return self.tried.count(self.most) == 4 and not self.broken
        once = place == "backward" and self.broken
        return self.tried[-1] > self.most and not once


def _fresh():
    torch.manual_seed(0)
    model = WithBuffers().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("where", slow_but(["late"], ["forward", "late", "backward"]))
def test_training_goes_on_with_the_same_result(where):
    """Cut and run again, under plans that change at every step: each sample counts once."""
    most = 7
    results = run_workers(WORLD_SIZE, train, where, most)

    counted = sorted(number for _, seen, _, _ in results for number in seen)
    assert counted == list(range(B * NUM_STEPS))
    tried = results[0][2]
    assert max(tried) > most, "it never ran out"
    for one, other, wanted in zip(results[0][0], results[1][0], alone(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-12)


def test_a_size_that_went_well_before_may_fail_in_a_later_forward():
    """Where it would have synchronised: it is cut, and the result stays."""
    sizes = (B // WORLD_SIZE,) * WORLD_SIZE
    results = run_workers(WORLD_SIZE, later, "inside", sizes)

    assert max(results[0][2][-3:]) < sizes[0], "it never ran out"
    for one, other, wanted in zip(results[0][0], results[1][0], alone(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-12)


def test_past_that_forward_the_error_says_what_to_do():
    """DDP is set on reducing it: an error with the remedy, and no mixed-up collective."""
    sizes = (B // WORLD_SIZE,) * WORLD_SIZE
    failed = run_workers(WORLD_SIZE, later, "straight", sizes, check=False)[0]

    assert "past a forward of 16 samples" in str(failed)
    assert "Bounds(max=8)" in str(failed)


def later(rank, where, sizes):
    """Return what ``train`` does with these sizes, of which the fourth forward fails."""
    return train(rank, where, sizes[0], sizes=sizes)


def test_the_cap_is_known_to_the_planner():
    """After it ran out once, rank 0 is given no larger forward than what went well."""
    (_, _, tried, cap), *_ = run_workers(WORLD_SIZE, train, "forward", 7)

    failed = [size for size in tried if size > 7]
    assert 1 <= len(failed) <= 3  # 24 of 48 might halve to 12 and 6
    assert cap <= 7


@pytest.mark.slow
def test_the_probe_finds_the_limit():
    """The first step tries what fits, and no forward of the run exceeds it."""
    bounds = Bounds(max="probe")
    results = run_workers(WORLD_SIZE, lambda_free_train, 10, bounds)
    (parameters, seen, tried, cap), *others = results

    assert 8 <= cap <= 10
    first_failure = next(k for k, size in enumerate(tried) if size > 10)
    trial_ends = max(k for k, size in enumerate(tried) if size > 10)
    assert all(size <= cap for size in tried[trial_ends + 1 :] if size != 10)
    assert first_failure <= trial_ends
    counted = sorted(seen + [number for _, more, _, _ in others for number in more])
    assert counted == list(range(B * NUM_STEPS))
    for one, wanted in zip(parameters, alone(), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-12)


def lambda_free_train(rank, most, bounds):
    """Return what ``train`` does with bounds."""
    return train(rank, "forward", most, bounds=bounds)


def test_a_loop_that_cannot_probe_is_told():
    """`Bounds(max="probe")` needs `step.backward`, and the error says so."""
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)
    with Balancer(bounds=Bounds(max="probe"), runtime=Runtime(line_every=None)) as balancer:
        _, loader = balancer.prepare(nn.Linear(2, 1), loader)

        with pytest.raises(ValueError, match=r"step\.backward\(closure\)"):
            list(next(loader.steps()))


def test_one_process_survives_too():
    """Without a process group, without DDP, with accumulating micro-batches."""
    data = TensorDataset(torch.randn(12, 2, dtype=torch.float64))
    model = nn.Linear(2, 1).double()
    whole = torch.autograd.grad(model(data.tensors[0]).square().mean(), model.parameters())

    def closure(batch):
        if len(batch[0]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(batch[0]).square().mean()

    with Balancer(runtime=Runtime(line_every=None)) as balancer:
        _, loader = balancer.prepare(model, DataLoader(data, batch_size=12))
        for step in loader.steps():
            step.backward(closure)

    for parameter, grad in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-15)
