"""What is random in a sample follows from the sample, and not from which rank computes it."""

import copy
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from evenstep.testing import run_workers
from evenstep.torch import Balancer, Bounds, Runtime

from .._tiers import Groups, slow_but
from .sample_seed_runs import LOOPS, Loop, broken_off, resumed, train, trained

SEEDED = Runtime(line_every=None, sample_seed=5)
FIRST = ("plain", "claims", "no seed")  # of `make test`
EXACT = [name for name in LOOPS if name != "no seed"]


@pytest.fixture(scope="module")
def alone():
    """The parameters that one process trains."""
    names = ("plain", "two loaders", "no seed")
    return trained(0, {name: LOOPS[name] for name in names}, plans=0)


@pytest.fixture(scope="module")
def split():
    """Those that 2 and 3 processes train, under unlike plans that change at every step."""
    return Groups(FIRST, LOOPS, on_ranks)


def on_ranks(names):
    """Return the parameters by the case and the number of ranks."""
    loops = {name: LOOPS[name] for name in names}
    found = {num: run_workers(num, trained, loops, num)[0] for num in (2, 3)}
    return {name: {num: found[num][name] for num in found} for name in names}


@pytest.mark.cluster
@pytest.mark.parametrize("loop", slow_but(FIRST, EXACT))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_split_does_not_matter(alone, split, loop, num_ranks):
    """Augmentation and dropout included, the parameters are those of one process."""
    wanted = alone["plain"] if loop != "two loaders" else alone[loop]

    assert (split[loop][num_ranks] - wanted).abs().max() <= 1e-12


@pytest.mark.cluster
def test_without_a_seed_it_would(alone, split):
    """The control: each rank's own numbers give other parameters."""
    assert (split["no seed"][2] - alone["no seed"]).abs().max() > 1e-3


@pytest.mark.cluster
def test_a_run_goes_on_as_if_it_had_not_been_broken_off(alone, tmp_path):
    """In the middle of an epoch, and on another number of ranks."""
    run_workers(3, broken_off, Loop(), str(tmp_path))
    after = run_workers(2, resumed, Loop(), str(tmp_path))[0]

    assert (after - alone["plain"]).abs().max() <= 1e-12


def test_another_seed_draws_other_numbers(alone):
    """And the same one the same numbers, whatever torch's own seed is."""
    assert torch.equal(train(1, Loop()), alone["plain"])
    assert not torch.allclose(train(0, Loop(seed=8)), alone["plain"])


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


class Drawn(Dataset):
    """Samples that are nothing but drawn."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([float(torch.rand(())), np.random.rand(), random.random()])


class Batched(Drawn):
    """Likewise, for a data set that fetches several in one go."""

    def __getitems__(self, indices):
        return [self[index] for index in reversed(indices)][::-1]


def samples_of(data):
    """The samples of an epoch."""
    with Balancer(runtime=SEEDED) as balancer:
        _, loader = balancer.prepare(nn.Linear(3, 1), DataLoader(data, batch_size=4))
        return torch.cat(list(loader))


def test_samples_that_are_fetched_together_draw_by_themselves():
    """In whatever order the data set reads them."""
    assert torch.equal(samples_of(Batched()), samples_of(Drawn()))


def states():
    """The states of the generators that scripts draw from."""
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_the_random_states_of_the_script_stay():
    """Whatever samples draw."""
    with Balancer(runtime=SEEDED) as balancer:
        _, loader = balancer.prepare(nn.Linear(3, 1), DataLoader(Drawn(), batch_size=4))
        batches = iter(loader)
        drawn, before = [next(batches)], states()
        drawn.extend(batches)

        assert states() == before
    assert len(set(torch.cat(drawn).flatten().tolist())) == 36


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
        model, _ = balancer.prepare(model, DataLoader(Drawn(), batch_size=4))
        with torch.no_grad():
            assert model(torch.ones(2, 1)).shape == (2, 1)


class Stream(IterableDataset):
    """Without an index."""

    def __iter__(self):
        return iter(torch.ones(8, 1))


def test_streams_and_compiled_models_are_refused():
    """By ``prepare``: their samples have no place, and what they draw cannot be seen."""
    with Balancer(runtime=SEEDED) as balancer:
        with pytest.raises(ValueError, match="be left out with a stream"):
            balancer.prepare(nn.Linear(1, 1), DataLoader(Stream()), stream="same")
        with pytest.raises(ValueError, match=re.escape("compiled by `torch.compile`")):
            balancer.prepare(torch.compile(nn.Linear(1, 1), backend="eager"))


@pytest.mark.parametrize("seed", [-1, 1 << 63, True, 1.0, "sample"])
def test_a_seed_is_an_integer_in_range(seed):
    """All else is refused where it is given."""
    with pytest.raises(ValueError, match="from 0 to 2\\^63 - 1"):
        Runtime(sample_seed=seed)


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
