"""What is random in a sample follows from the sample, and not from which rank computes it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

from evenstep.claims import Hybrid
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Bounds, Runtime

from .._tiers import Groups, slow_but
from .plans import Restless

GLOBAL, NUM_SAMPLES, NUM_EPOCHS = 12, 12 * 3 + 5, 2  # three full steps in an epoch, and a short one
LENGTHS = tuple(1 + number % 7 for number in range(NUM_SAMPLES))


@dataclass(frozen=True)
class Loop:
    """How a script loops.

    Attributes:
        by_steps: whether it takes micro-batches.
        num_workers: processes that fetch.
        costs: whether samples are assigned by cost.
        claims: whether samples are claimed.
        num_loaders: that take turns, one epoch each.
        shards: whether FSDP2 shards the model.
        ahead: whether it fetches a batch ahead, and trains on copies.
        seed: of what is random in samples; None leaves it to the ranks.
        first: step to resume at.
        last: step to stop before.
    """

    by_steps: bool = False
    num_workers: int = 0
    costs: bool = False
    claims: bool = False
    num_loaders: int = 1
    shards: bool = False
    ahead: bool = False
    seed: int | None = 7
    first: int = 0
    last: int | None = None


LOOPS = {
    "plain": Loop(),
    "workers": Loop(num_workers=2),
    "micro-batches": Loop(by_steps=True),
    "claims": Loop(by_steps=True, claims=True),
    "costs": Loop(by_steps=True, costs=True),
    "two loaders": Loop(num_loaders=2),
    "fetched ahead": Loop(ahead=True),
    "FSDP2": Loop(by_steps=True, shards=True),
    "no seed": Loop(seed=None),
}


class Noisy(Dataset):
    """Samples with an augmentation from each of the three generators."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.values = torch.randn(NUM_SAMPLES, 16, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randn(16, dtype=torch.float64) + np.random.rand() + random.random()
        return self.values[index] + 0.3 * noise


class Dropping(nn.Module):
    """Dropout of elements, of channels and of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 1)
        self.elements, self.channels = nn.Dropout(0.4), nn.Dropout2d(0.3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = self.elements(self.first(value).tanh())
        hidden = self.channels(hidden.view(-1, 8, 2, 2)).flatten(1)
        kept = hidden.new_empty(len(hidden), 1).bernoulli_(0.8)
        return self.last(functional.dropout(hidden * kept, 0.2, self.training, inplace=True))


def train(rank: int, loop: Loop, folder: str = "", plans: int = 0) -> torch.Tensor:
    """Return all parameters after a run, or from one step to another of it.

    Args:
        rank: this process.
        loop: how it loops.
        folder: where the state is read from and written to, if it does not run from end to end.
        plans: seed of the sizes, which change after every step.
    """
    torch.manual_seed(3)
    model = Dropping().double()
    torch.manual_seed(100 + rank)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if loop.shards and world_size > 1:
        fully_shard(model.first)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    runtime = Runtime(
        line_every=None, sample_seed=loop.seed, claims=Hybrid(first=0.5) if loop.claims else "off"
    )
    with Balancer(
        policy="equal" if loop.costs else Restless(plans),
        bounds=Bounds(max=3) if loop.by_steps and not loop.costs else Bounds(),
        runtime=runtime,
        cost=LENGTHS if loop.costs else None,
    ) as balancer:
        wrapped, loader = balancer.prepare(model, _stock(loop, world_size, 0))
        others = [
            balancer.prepare(_stock(loop, world_size, number))
            for number in range(1, loop.num_loaders)
        ]
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        if loop.first:
            state = torch.load(f"{folder}/state", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(state[name])
        steps = _steps(loop, [loader, *others])
        if loop.last is not None:
            steps = islice(steps, loop.last - loop.first)
        for step in steps:
            for value in step:
                wrapped(value).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if loop.last is not None and rank == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, f"{folder}/state")
    whole = [_whole(parameter.detach()) for parameter in model.parameters()]
    return nn.utils.parameters_to_vector(whole)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def trained(rank: int, loops: dict[str, Loop], plans: int) -> dict[str, torch.Tensor]:
    """Return the parameters after each of several runs."""
    return {name: train(rank, loop, plans=plans) for name, loop in loops.items()}


def broken_off(rank: int, loop: Loop, folder: str) -> None:
    """Train up to the middle of the second epoch, and keep the state."""
    train(rank, replace(loop, last=6), folder, plans=1)


def resumed(rank: int, loop: Loop, folder: str) -> torch.Tensor:
    """Go on from there to the end, under other plans."""
    return train(rank, replace(loop, first=6), folder, plans=2)


def _stock(loop: Loop, world_size: int, number: int) -> DataLoader[Any]:
    return DataLoader(
        Noisy(),
        batch_size=GLOBAL // world_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(2 + number),
        num_workers=loop.num_workers,
    )


def _steps(loop: Loop, loaders: list[Any]) -> Iterator[Any]:
    """Yield the batches of every step."""
    for epoch in range(2 if loop.first else 1, NUM_EPOCHS + 1):
        loader = loaders[(epoch - 1) % len(loaders)]
        if loop.by_steps:
            yield from loader.steps()
        elif loop.ahead:
            yield from _ahead(loader)
        else:
            yield from ([batch] for batch in loader)


def _ahead(loader: Any) -> Iterator[list[torch.Tensor]]:
    batches = iter(loader)
    held = next(batches)
    for batch in batches:
        yield [held.clone()]
        held = batch
    yield [held.clone()]


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
