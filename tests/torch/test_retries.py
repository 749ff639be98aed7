"""A forward that does not fit is made smaller, and the step keeps its samples and its gradient."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from evenstep.torch._data._protocols import MicroBatch
from evenstep.torch._memory._layout import Layout
from evenstep.torch._memory._retries import Retries, is_out_of_memory


class Memory:
    """Runs out at forwards of more than ``most`` samples."""

    def __init__(self, most):
        self.most, self.sizes = most, []

    def check(self, size):
        self.sizes.append(size)
        if size > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Weights:
    """Stands where the conductor does: weights every forward by its share of the step."""

    def __init__(self, total):
        self.total, self.weight, self.limits, self.again = total, 0.0, [], 0

    def begin_forward(self, step, part, *, is_last):
        self.weight = part.num_samples / self.total

    def found_limit(self, limit):
        self.limits.append(limit)

    def ran_out_of_memory(self, limit, *, again):
        self.limits.append(limit)
        self.again += again


class Models:
    """One plain module, of which we say that it synchronises."""

    can_run_again, synchronise = True, True

    def __init__(self, module):
        self.module, self.no_sync, self.forgotten = module, nullcontext, 0

    def modules(self):
        return [self.module]

    def parameters(self):
        return self.module.parameters()

    expects_reduction = False

    def expect_forward(self): ...

    def end_forward(self): ...

    def forget_forward(self):
        self.forgotten += 1


def replay(memory):
    """Return a model and 12 samples, and what runs them in the memory that there is."""
    torch.manual_seed(0)
    model, weights = nn.Linear(4, 2).double(), Weights(12)
    x = torch.randn(12, 4, dtype=torch.float64)
    attempts = Retries(Models(model), weights, layout=lambda: Layout(torch.ones))

    def closure(batch):
        memory.check(len(batch))
        return model(batch).square().mean()

    def through(loss):
        (loss * weights.weight).backward()

    return model, x, weights, attempts, closure, through


def expected(model, x):
    loss = model(x).square().mean()
    return torch.autograd.grad(loss, list(model.parameters())), loss.detach()


@pytest.mark.parametrize("most", [1, 2, 5, 11, 12])
def test_the_gradient_is_that_of_the_whole_batch(most):
    """Whatever fits, the parts that ran add up to the same gradient and the same mean loss."""
    memory = Memory(most)
    model, x, weights, attempts, closure, through = replay(memory)
    wanted, mean = expected(model, x)

    loss = attempts.run(0, [MicroBatch(x, 12)], closure, through)

    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(loss, mean)
    assert all(limit <= max(most, 1) for limit in weights.limits[-1:])


def test_a_size_that_went_well_goes_straight():
    """A new size is followed by a stand-in that synchronises; the same size again is not."""
    memory = Memory(100)
    _, x, _, attempts, closure, through = replay(memory)

    attempts.run(0, [MicroBatch(x, 12)], closure, through)
    attempts.run(0, [MicroBatch(x, 12)], closure, through)
    attempts.run(0, [MicroBatch(x[:7], 7)], closure, through)

    assert memory.sizes == [12, 1, 12, 7]


def test_the_limit_stays():
    """The step after one that ran out begins with parts that fit."""
    memory = Memory(5)
    _, x, _, attempts, closure, through = replay(memory)
    attempts.run(0, [MicroBatch(x, 12)], closure, through)
    memory.sizes.clear()

    attempts.run(0, [MicroBatch(x, 12)], closure, through)

    assert max(memory.sizes) <= 5
    assert sum(memory.sizes) == 12


def test_a_backward_that_broke_off_is_taken_back():
    """Half a gradient of a failed part does not stay: the whole step runs again."""
    model = nn.Linear(4, 2).double()
    x = torch.randn(12, 4, dtype=torch.float64)
    wanted, _ = expected(model, x)
    weights = Weights(12)
    attempts = Retries(Models(model), weights, layout=lambda: Layout(torch.ones))
    broken = []

    def through(loss):
        if not broken:
            broken.append(True)
            (0.3 * loss).backward()
            raise torch.OutOfMemoryError("CUDA out of memory")
        (loss * weights.weight).backward()

    attempts.run(0, [MicroBatch(x, 12)], lambda batch: model(batch).square().mean(), through)

    assert weights.again == 1
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-15)


def test_gradients_of_earlier_steps_cannot_be_put_back():
    """A backward that broke off over accumulated gradients is an error with the remedy."""
    model = nn.Linear(4, 2)
    model(torch.ones(1, 4)).sum().backward()
    attempts = Retries(Models(model), Weights(4), layout=lambda: Layout(torch.ones))

    def through(loss):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="zero_grad"):
        attempts.run(
            0, [MicroBatch(torch.ones(4, 4), 4)], lambda batch: model(batch).sum(), through
        )


def test_what_cannot_be_made_smaller_is_an_error():
    """A single sample that does not fit says what else to do, and keeps the cause."""
    _, x, _, attempts, closure, through = replay(Memory(0))

    with pytest.raises(RuntimeError, match="no smaller one is possible") as caught:
        attempts.run(0, [MicroBatch(x, 12)], closure, through)

    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_other_errors_pass():
    """An error of the user's own is not taken for a lack of memory."""
    _, x, _, attempts, _, through = replay(Memory(100))

    def closure(batch):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        attempts.run(0, [MicroBatch(x, 12)], closure, through)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas...`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling ..."), False),
        (RuntimeError("expected scalar type Float"), False),
        (KeyError("out of memory"), False),
    ],
)
def test_what_counts_as_a_lack_of_memory(error, wanted):
    """Torch's own error and what backends without one say."""
    assert is_out_of_memory(error) is wanted


def test_one_failure_does_not_cap_at_what_happened_to_be_seen():
    """Small steps that went well before are no reason for a limit below the half."""
    memory = Memory(100)
    _, x, weights, attempts, closure, through = replay(memory)
    attempts.run(0, [MicroBatch(x[:3], 3)], closure, through)
    attempts.run(0, [MicroBatch(x, 12)], closure, through)
    memory.most = 8

    attempts.run(0, [MicroBatch(x, 12)], closure, through)

    assert weights.limits == [6]


@pytest.mark.parametrize("most", [3, 100])
def test_a_sum_is_added_up(most):
    """The loss of a step does not depend on how it was cut."""
    model, weights = nn.Linear(4, 2), Weights(12)
    attempts = Retries(
        Models(model), weights, loss_reduction="sum", layout=lambda: Layout(torch.ones)
    )

    def closure(batch):
        Memory(most).check(len(batch))
        return model(batch).sum() * 0 + len(batch)

    loss = attempts.run(0, [MicroBatch(torch.ones(12, 4), 12)], closure, lambda loss: None)

    assert float(loss) == 12.0
