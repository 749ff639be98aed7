"""A forward that does not fit is made smaller; the largest that fits is found by trial."""

import os
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from evenstep.torch._data._protocols import MicroBatch
from evenstep.torch._memory import Layout, Retries, is_out_of_memory, layout_by, probe

from .._tiers import slow_but


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


class Alone:
    """A model in no DDP."""

    def __init__(self, model):
        self.model = model

    def modules(self):
        return [self.model]

    def no_sync(self):
        return nullcontext()

    def forget_forward(self):
        """Nothing to undo."""


def limit(fits, *, held=4, most=64, smallest=1, model=None):
    """Return what ``probe`` finds where ``fits`` samples do, and the sizes that it tried."""
    model = model or nn.Linear(3, 1)
    sizes = []

    def closure(batch):
        sizes.append(len(batch))
        if len(batch) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(batch).mean()

    found = probe(
        MicroBatch(torch.randn(held, 3), held),
        closure,
        lambda loss: loss.backward(),
        most=most,
        smallest=smallest,
        layout=Layout(torch.ones),
        models=Alone(model),
    )
    return found, sizes


@pytest.mark.parametrize("fits", slow_but([1, 17], [1, 2, 3, 5, 17, 40, 63]))
def test_the_limit_is_found_within_a_tenth(fits):
    """Never above what fits, with a tenth left free, and near it."""
    found, _ = limit(fits)

    assert found <= fits
    assert found >= max(1, int(0.9 * 0.9 * fits) - 1)


def test_no_limit_where_all_fits():
    """No more is tried than is worth knowing."""
    found, sizes = limit(1000)

    assert found is None
    assert max(sizes) == 64


def test_one_that_fits_nothing_is_an_error():
    """Less than the smallest forward that is possible."""
    with pytest.raises(RuntimeError, match="Not even 2 samples"):
        limit(1, smallest=2)


def test_other_errors_of_a_trial_pass():
    """An error of the user's own ends the trial."""
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        limit(1000, model=nn.Linear(5, 1))


def test_the_trial_leaves_no_trace():
    """Gradients, running statistics and the random state are what they were."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    model(torch.randn(8, 3)).sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()

    # The batch of the trial is drawn before it begins.
    torch.randn(4, 3)
    after_draw = torch.get_rng_state()
    torch.set_rng_state(state)
    limit(9, model=model, smallest=2)

    assert torch.equal(torch.get_rng_state(), after_draw)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, value)


Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Graphs:
    """A batch of a user's own."""

    nodes: torch.Tensor
    names: list


X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)


KINDS = {
    "list": lambda x, y: [x, y],
    "tuple": lambda x, y: (x, y),
    "named tuple": Pair,
    "dicts": lambda x, y: {"x": x, "more": {"y": y}},
    "dataclass": lambda x, y: Graphs(x, list("abcdef")[: len(x)]),
    "as many fields as samples": lambda x, y: [x, y, x.clone(), y.clone(), -x, -y],
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_put_together_are_the_batch(kind):
    """Each sample is in one part, in order, in every field."""
    make = KINDS[kind]
    batch, layout = make(X, Y), Layout(lambda size: make(X[:size], Y[:size]))
    parts = layout.split(batch, 6, (1, 3, 2))

    assert [type(part) for part in parts] == [type(batch)] * 3
    for fields in zip(_leaves(batch), *map(_leaves, parts), strict=True):
        whole, *pieces = fields
        assert [len(piece) for piece in pieces] == [1, 3, 2]
        if isinstance(whole, list):
            assert [entry for piece in pieces for entry in piece] == whole
        else:
            assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("num_samples", [2, 3, 6])
def test_what_is_as_long_as_the_batch_by_chance_stays_whole(num_samples):
    """Class weights, names of classes, a mask over positions, in a batch of as many samples."""

    def make(size):
        names = [f"class {n}" for n in range(num_samples)]
        more = {"names": names, "mask": torch.ones(num_samples, num_samples)}
        return X[:size], torch.ones(num_samples), more

    for part in Layout(make).split(make(num_samples), num_samples, (1, num_samples - 1)):
        x, weights, more = part
        assert len(x) < num_samples
        assert len(weights) == len(more["names"]) == len(more["mask"]) == num_samples


def test_what_nobody_can_tell_of_is_refused():
    """A field that other batches lack, or that has another length than its samples."""
    layout = Layout(lambda size: {"x": X[:size], "nodes": X[:size]})

    with pytest.raises(ValueError, match=r"got `batch\['seldom'\]` with 6 entries. Have"):
        layout.split({"x": X, "nodes": X, "seldom": Y}, 6, (3, 3))
    with pytest.raises(ValueError, match=r"got `batch\['nodes'\]` with 5 entries. Have"):
        layout.split({"x": X, "nodes": X[:5]}, 6, (3, 3))


class Drawn(Dataset):
    """Samples with noise, which say in which process they were made."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return X[index] + torch.rand(2), os.getpid()


def with_weights(samples):
    """Collate, with the process that it was done in and three class weights."""
    pids = {pid for _, pid in samples}
    return torch.stack([x for x, _ in samples]), torch.ones(3), pids, torch.rand(1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_loaders_own_collating_tells(num_workers):
    """Of samples that are fetched where the loader fetches them; random states stay."""
    loader = DataLoader(Drawn(), 3, collate_fn=with_weights, num_workers=num_workers)
    before = torch.get_rng_state()

    layout = layout_by(loader, None)()

    assert torch.equal(torch.get_rng_state(), before)
    batch = next(iter(loader))
    assert (batch[2] == {os.getpid()}) == (num_workers == 0)
    assert layout.per_sample(batch, 3) == [batch[0]]


def test_lists_of_samples_are_cut():
    """A `collate_fn` that keeps samples apart gives a list of them."""
    samples = [torch.zeros(n + 10) for n in range(6)]
    layout = Layout(lambda size: samples[:size])

    assert [len(part) for part in layout.split(samples, 6, (4, 2))] == [4, 2]


def test_samples_in_tuples_are_cut_as_a_whole():
    """`tuple(zip(*samples))`, as detection models collate: no target is looked into."""
    images = tuple(torch.zeros(3, 8, 8) for _ in range(4))
    boxes = tuple({"boxes": torch.zeros(count, 4)} for count in (4, 1, 2, 4))

    layout = Layout(lambda size: (images[:size], boxes[:size]))
    parts = layout.split((images, boxes), 4, (1, 3))

    assert [[len(field) for field in part] for part in parts] == [[1, 1], [3, 3]]
    assert [len(target["boxes"]) for target in parts[1][1]] == [1, 2, 4]
    assert len(layout.repeat((images, boxes), 4, 9)[0]) == 9


def test_what_is_not_per_sample_goes_to_every_part():
    """A scalar, a text, a mask over positions."""
    batch = {"x": X, "scale": torch.tensor(2.0), "task": "a", "mask": torch.ones(9, 9)}

    layout = Layout(lambda size: {**batch, "x": X[:size]})
    for part in layout.split(batch, 6, (2, 4)):
        assert (part["scale"], part["task"], part["mask"].shape) == (2.0, "a", (9, 9))


def test_rows_are_repeated():
    """More samples than there are: from the first again."""
    layout = Layout(lambda size: [X[:size], list("abcdef")[:size]])
    x, y = layout.repeat([X, list("abcdef")], 6, 8)

    assert torch.equal(x, torch.cat([X, X[:2]]))
    assert y == list("abcdefab")


def test_a_batch_without_samples_is_refused():
    """Nothing with one entry per sample: the error says what to do."""

    def packed(size):
        return {"packed": torch.zeros(1, 10 * size)}

    with pytest.raises(ValueError, match="Bounds\\(max"):
        Layout(packed).split(packed(6), 6, (3, 3))


def _leaves(item):
    if isinstance(item, dict):
        return [leaf for entry in item.values() for leaf in _leaves(entry)]
    if isinstance(item, Graphs):
        return [item.nodes, item.names]
    if isinstance(item, (list, tuple)) and isinstance(item[0], torch.Tensor):
        return list(item)
    return [item]
