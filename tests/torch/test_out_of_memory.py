"""A worker that runs out of memory loses no sample, and the result is that of one process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.testing import run_workers
from evenstep.torch import Balancer, Bounds, Runtime

from .._tiers import slow_but
from .memory_runs import NUM_STEPS, WORLD_SIZE, B, alone, train


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
