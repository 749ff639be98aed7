"""Dropout draws by sample: what masks are like, and what cannot follow is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from evenstep.torch import Balancer, Bounds, Runtime

SEEDED = Runtime(line_every=None, sample_seed=5)


class Masks(nn.Module):
    """Shows what a dropout keeps of ones."""

    def __init__(self, shape=(512,), chance=0.3):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.shape, self.dropout = shape, nn.Dropout(chance)

    def forward(self, value):
        ones = torch.ones(len(value), *self.shape, dtype=value.dtype)
        return self.dropout(ones) * self.factor


def outputs(model, *, num_samples=64, batch_size=16, bounds=None, forwards=1, runtime=SEEDED):
    """What a model returns for each sample, ``(num_samples, forwards, ...)``; all is trained on."""
    found = {}
    data = TensorDataset(torch.arange(num_samples, dtype=torch.float64)[:, None])
    with Balancer(runtime=runtime, bounds=bounds or Bounds()) as balancer:
        model, loader = balancer.prepare(model.double(), DataLoader(data, batch_size=batch_size))
        steps = loader.steps() if bounds else ([batch] for batch in loader)
        for step in steps:
            for (value,) in step:
                several = torch.stack([model(value) for _ in range(forwards)], dim=1)
                several.mean().backward()
                found.update(zip(value[:, 0].int().tolist(), several.detach(), strict=True))
    return torch.stack([found[number] for number in sorted(found)])


def test_a_row_keeps_its_mask_whatever_else_is_in_the_batch():
    """Bit by bit: in micro-batches of three, or sixteen together."""
    assert torch.equal(outputs(Masks()), outputs(Masks(), bounds=Bounds(max=3)))


def test_a_padded_row_keeps_its_mask():
    """Padding depends on what shares the batch: it must not change what is not padding."""
    short, long = outputs(Masks((5, 8))), outputs(Masks((9, 8)))

    assert torch.equal(short, long[:, :, :5])
    assert not torch.equal(long[:, :, :4], long[:, :, 5:])


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.9])
def test_as_many_are_dropped_as_asked_for(chance):
    """Over all, over rows and over columns, within what chance does; the others are scaled."""
    shown = outputs(Masks((512,), chance))[:, 0]
    dropped = (shown == 0).double()
    rate = (chance * (1 - chance)) ** 0.5

    assert set(shown[shown != 0].tolist()) == {1 / (1 - chance)}
    assert abs(dropped.mean() - chance) < 4 * rate / dropped.numel() ** 0.5
    for axis, number in ((0, 64), (1, 512)):
        deviations = (dropped.mean(axis) - chance) / (rate / number**0.5)
        assert deviations.abs().max() < 6  # of 512, of a skewed kind
        assert 0.7 < deviations.std() < 1.3


def test_rows_columns_and_calls_are_independent():
    """No two of them agree more, or less, than chance does."""
    shown = (outputs(Masks((128,), 0.5), forwards=2) == 0).double() * 2 - 1  # of 64 rows
    first, second = shown[:, 0], shown[:, 1]
    columns = first.T
    neighbours = (first[:, 1:] * first[:, :-1]).mean() * first[:, 1:].numel() ** 0.5

    for one, other in ((first, first), (first, second), (columns, columns)):
        agreement = one @ other.T / one.shape[1] ** 0.5
        if one is other:
            agreement.fill_diagonal_(0)
        assert agreement.abs().max() < 5.5
    assert abs(neighbours) < 4


def test_epochs_and_dropouts_of_a_forward_differ():
    """The second epoch drops others, and so does each of forty dropouts."""

    class Many(Masks):
        def forward(self, value):
            return torch.stack([Masks.forward(self, value) for _ in range(40)], dim=1)

    assert len(torch.unique(outputs(Many(), forwards=2)[0].view(80, -1), dim=0)) == 80

    shown = []
    with Balancer(runtime=SEEDED) as balancer:
        model, loader = balancer.prepare(
            Masks(), DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=8)
        )
        for _ in range(2):
            for (value,) in loader:
                shown.append(model(value))
                shown[-1].mean().backward()
    assert not torch.equal(*shown)


class Through(nn.Module):
    """A layer, and a function in front of it."""

    def __init__(self, function, *layers):
        super().__init__()
        self.last, self.function = nn.Linear(6, 1), function
        self.layers = nn.ModuleList(layers)

    def forward(self, value):
        return self.last(self.function(value.expand(-1, 6), *self.layers))


def attention(value, layer):
    """Self-attention with the samples first."""
    return layer(value[:, None], value[:, None], value[:, None])[0][:, 0]


def fused(value):
    """The fused kernel."""
    value = value[:, None, None]
    return functional.scaled_dot_product_attention(value, value, value, dropout_p=0.1)[:, 0, 0]


REFUSED = {
    "attention": (
        Through(attention, nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)),
        "dropout=0",
    ),
    "fused": (Through(fused), 'attn_implementation="eager"'),
    "recurrent": (
        Through(
            lambda value, layer: layer(value[:, None])[0][:, 0],
            nn.LSTM(6, 6, num_layers=2, dropout=0.1, batch_first=True),
        ),
        "one layer each",
    ),
    "rand": (Through(lambda value: value + torch.rand(6)), "Draw in the data set"),
    "noise": (Through(lambda value: value + torch.randn_like(value)), "Draw in the data set"),
    "flattened": (
        Through(lambda value: functional.dropout(value.reshape(-1), 0.5).view(-1, 6)),
        "`dropout` of (96,) in a forward of 16 samples",
    ),
    "time first": (
        Through(lambda value: functional.dropout(value.T, 0.5).T),
        "batch_first=True",
    ),
    "checkpoint": (
        Through(lambda value, drop: checkpoint(drop, value, use_reentrant=False), nn.Dropout()),
        "activation checkpointing",
    ),
}


def run_step(model):
    """Train a model in single precision for a step on 16 samples."""
    data = TensorDataset(torch.arange(16, dtype=torch.float32)[:, None])
    with Balancer(runtime=SEEDED) as balancer:
        model, loader = balancer.prepare(model, DataLoader(data, batch_size=16))
        for (value,) in loader:
            model(value).mean().backward()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_follow_is_refused_by_name(kind):
    """With the setting, what it is, and the remedy; torch is as it was afterwards."""
    model, told = REFUSED[kind]
    with pytest.raises(ValueError, match=r"Runtime\(sample_seed=\.\.\.\)") as caught:
        run_step(model)

    assert told in str(caught.value)
    assert torch.rand(2).shape == (2,)


ALLOWED = {
    "attention without": Through(attention, nn.MultiheadAttention(6, 2, batch_first=True)),
    "one recurrent layer": Through(
        lambda value, layer: layer(value[:, None])[0][:, 0], nn.GRU(6, 6, batch_first=True)
    ),
    "own generator": Through(
        lambda value: value + torch.rand(6, generator=torch.Generator().manual_seed(1))
    ),
    "nothing dropped": Through(lambda value: functional.dropout(value.T, 0.0).T),
    "all dropped": Through(lambda value: functional.dropout(value, 1.0)),
}


@pytest.mark.parametrize("kind", ALLOWED)
def test_what_draws_nothing_of_the_ranks_is_not_refused(kind):
    """Layers whose dropout is 0, and draws from a generator that is given."""
    run_step(ALLOWED[kind])


def test_evaluation_and_other_code_draw_as_ever():
    """A forward without a batch, and what is outside of forwards, is not touched."""
    model = Through(lambda value: value + torch.rand(6))
    with Balancer(runtime=SEEDED) as balancer:
        model, _ = balancer.prepare(model, DataLoader(TensorDataset(torch.ones(8, 1))))
        with torch.no_grad():
            assert model(torch.ones(2, 1)).shape == (2, 1)


def test_a_copy_of_the_model_is_a_plain_one():
    """As for averages of weights: it carries nothing of the balancer."""
    with Balancer(runtime=SEEDED) as balancer:
        model = balancer.prepare(Masks())
        copied = copy.deepcopy(model)

        assert copied(torch.ones(2, 1)).shape == (2, 512)
    assert not model._forward_hooks


def test_what_runs_again_for_lack_of_memory_draws_the_same():
    """A step that was cut and run again has the dropout that it would have had."""

    def train_with(most):
        sizes = []

        def closure(batch):
            sizes.append(len(batch[0]))
            loss = model(batch[0]).square().mean()
            if len(batch[0]) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss

        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        data = TensorDataset(torch.randn(32, 6, dtype=torch.float64))
        with Balancer(runtime=SEEDED) as balancer:
            model, loader = balancer.prepare(model, DataLoader(data, batch_size=16))
            for step in loader.steps():
                step.backward(closure)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), sizes

    whole, _ = train_with(16)
    cut, sizes = train_with(5)

    assert max(sizes[-2:]) <= 5
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)
