"""``EVENSTEP=off`` leaves the script plain, and every call in it goes on working."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from evenstep.testing import run_workers
from evenstep.torch import Balancer, Checkpoint, Drain, Runtime

from .exactness import samples
from .models import Mlp
from .plans import Restless

pytestmark = pytest.mark.cluster

SETTINGS: dict[str, Any] = {"policy": Restless(), "runtime": Runtime(line_every=None)}
NUM_EPOCHS = 2


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return Mlp().double()


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def sharded() -> DataLoader:
    data = samples()
    return DataLoader(data, 8, sampler=DistributedSampler(data, seed=3), drop_last=True)


def train(model: nn.Module, loader: Any) -> torch.Tensor:
    """Train as the DDP tutorial does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(NUM_EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def plain_and_off(rank: int) -> dict[str, Any]:
    """Return how far apart both end, and what evenstep has put on the model."""
    alone = train(DistributedDataParallel(mlp()), sharded())
    os.environ["EVENSTEP"] = "off"
    threads = set(threading.enumerate())
    with Balancer(**SETTINGS) as balancer:
        model, loader = balancer.prepare(mlp(), sharded())
        hooks = [*model._forward_hooks, *model._forward_pre_hooks]
        ends = train(model, loader)
        started = set(threading.enumerate()) - threads
    return {
        "alike": torch.allclose(ends, alone, rtol=1e-12, atol=1e-14),
        "kind": type(model).__name__,
        "hooks": len(hooks),
        "threads": len(started),
    }


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(13))


class Reversed(Sampler):
    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[int]:
        return iter(range(12, -1, -1))


LOADERS = {
    "in order": lambda: DataLoader(range(13), 2),
    "shuffled": lambda: DataLoader(range(13), 2, shuffle=True),
    "loader workers": lambda: DataLoader(range(13), 2, shuffle=True, num_workers=2),
    "a sampler": lambda: DataLoader(range(13), 2, sampler=Reversed()),
    "batches": lambda: DataLoader(range(12), batch_sampler=[[0, 1, 2, 3], [4, 5, 6], [7]]),
    "sharded already": lambda: DataLoader(range(13), 2, sampler=DistributedSampler(range(13))),
    "the same stream": lambda: DataLoader(Numbers(), 2),
    "without end": lambda: DataLoader(
        range(13), 2, sampler=RandomSampler(range(13), replacement=True, num_samples=int(1e10))
    ),
}


def numbers(rank: int, switch: str) -> dict[str, list[list[list[int]]]]:
    """Return the batches of two epochs of each loader on this rank."""
    os.environ["EVENSTEP"] = switch
    found = {}
    for name, make in LOADERS.items():
        torch.manual_seed(rank)  # as scripts that seed by rank
        settings = {**SETTINGS, "global_batch_size": 4} if name == "batches" else SETTINGS
        with Balancer(**settings) as balancer:
            stream = "same" if name == "the same stream" else None
            model, loader = balancer.prepare(mlp(), make(), stream=stream)
            found[name] = [list(islice(_trained(model, balancer, loader), 5)) for _ in range(2)]
    return found


def _trained(model: nn.Module, balancer: Balancer, loader: Any) -> Iterator[list[int]]:
    for batch in loader:
        model(batch[:, None].expand(-1, 6).double()).mean().backward()
        yield batch.tolist()[: balancer.num_samples]


def resumed(rank: int, switches: tuple[str, str]) -> list[int]:
    """Return the samples of an epoch and a bit, of which the second half has another switch."""
    found: list[int] = []
    state: dict[str, Any] = {}
    for switch in switches:
        os.environ["EVENSTEP"] = switch
        torch.manual_seed(rank)
        with Balancer(**SETTINGS) as balancer:
            model, loader = balancer.prepare(mlp(), DataLoader(range(24), 2, shuffle=True))
            if state:
                loader.load_state_dict(state)
            for batch in islice(_trained(model, balancer, loader), 3):
                found += batch
            state = loader.state_dict()
    return found


def everything(rank: int, folder: str) -> dict[str, Any]:
    """Call what a script may call."""
    os.environ["EVENSTEP"] = "off"
    seen = []
    with Balancer(**SETTINGS) as balancer, Drain(balancer) as drain:
        model = mlp()
        loader = DataLoader(samples(), 8, shuffle=True)
        model, loader = balancer.prepare(model, loader, weighting="loss")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = {"model": model, "optimizer": optimizer, "loader": loader, "balancer": balancer}
        checkpoint = Checkpoint(folder, **parts)
        before = balancer.batch_sizes, balancer.num_samples, len(loader)
        for number, step in enumerate(loader.steps()):
            (first,) = step.micro_batches
            for x, y in step:
                loss = balancer.weight(functional.cross_entropy(model(x), y))
                loss.backward()
            assert len(x) == step.num_samples == balancer.num_samples == first.num_samples
            seen.append(balancer.mean(float(rank)))
            optimizer.step()
            if number == 1:
                checkpoint.save(number)
                break
        assert not drain.requested
        step.backward(lambda batch: functional.cross_entropy(model(batch[0]), batch[1]))
        balancer.average_buffers()
        evaluation = balancer.prepare_eval(DataLoader(samples(), 7))
        for x, _ in evaluation:
            evaluation.add("first", x[:, 0].mean())
        means = evaluation.mean()
        loader.set_epoch(5)
        sizes, servers = balancer.batch_sizes, balancer.is_server
    with Balancer(**SETTINGS) as again:
        _, later = again.prepare(mlp(), DataLoader(samples(), 8, shuffle=True))
        Checkpoint(folder, **{**parts, "loader": later, "balancer": again}).load()
        left = sum(1 for _ in later)
    return {
        "before": before,
        "means": seen,
        "first": means["first"] - float(samples().tensors[0][:, 0].mean()),
        "sizes": sizes,
        "server": servers,
        "left": left,
        "steps": len(later),
    }


def differing(rank: int, values: list[str]) -> str:
    """Return the error of a rank whose environment has one of these values."""
    os.environ["EVENSTEP"] = values[rank]
    try:
        Balancer(**SETTINGS).prepare(mlp())
    except ValueError as error:
        return str(error)
    return ""


def test_it_trains_as_plain_ddp():
    """Without a hook on the model, and without a thread: 1e-12 in double precision."""
    for found in run_workers(2, plain_and_off):
        assert found == {
            "alike": True,
            "kind": "DistributedDataParallel",
            "hooks": 0,
            "threads": 0,
        }


@pytest.fixture(scope="module")
def batches():
    """The numbers that each rank was given, by switch, rank, loader, epoch and batch."""
    return {switch: run_workers(2, numbers, switch) for switch in ("off", "on")}


@pytest.mark.parametrize("name", LOADERS)
def test_a_step_has_the_samples_of_a_balanced_run(batches, name):
    """In equal parts: of samplers with 10**10 indices too, and where ranks are seeded unlike."""
    for epoch in (0, 1):
        plain, balanced = (
            [sorted(mine + theirs) for mine, theirs in zip(*parts, strict=True)]
            for parts in ([rank[name][epoch] for rank in batches[way]] for way in ("off", "on"))
        )
        full = [rank[name][epoch][0] for rank in batches["off"]]

        assert plain == balanced
        assert list(map(len, full)) == [2, 2]


@pytest.mark.parametrize("switches", [("off", "on"), ("on", "off"), ("off", "off")])
def test_a_checkpoint_goes_on_with_the_other_switch(switches):
    """No sample of the epoch is left out or repeated."""
    mine, theirs = run_workers(2, resumed, switches)

    assert sorted(mine + theirs) == list(range(24))


def test_every_call_of_a_script_works(tmp_path):
    """Steps, means, weights, evaluation, checkpoints within an epoch."""
    for found in run_workers(2, everything, str(tmp_path)):
        assert found["before"] == ((), 0, found["steps"])
        assert found["means"] == [0.5, 0.5]
        assert abs(found["first"]) <= 1e-12
        assert (found["sizes"], found["server"]) == ((8, 8), False)
        assert found["left"] == found["steps"] - 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["off", ""], "be the same on all ranks, got 'off' on rank 0 and 'on' on rank 1. Set"),
        (["on", "off"], "be the same on all ranks, got 'on' on rank 0 and 'off' on rank 1. Set"),
        (["off", "no"], '`EVENSTEP` must be "off", "on" or left out, got \'no\' on rank 1.'),
        (["0", "0"], '`EVENSTEP` must be "off", "on" or left out, got \'0\' on rank 0.'),
    ],
)
def test_ranks_that_differ_are_refused(values, words):
    """On both, and so is any other value."""
    for text in run_workers(2, differing, values):
        assert words in text


def test_on_and_nothing_balance():
    """The default."""
    assert run_workers(2, differing, ["on", ""]) == ["", ""]
