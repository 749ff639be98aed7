"""What workers run that profile before they train."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evenstep.events import EstimatesRestored
from evenstep.policies import Fixed
from evenstep.timemodels import ClusterProfile
from evenstep.torch import Balancer, Bounds, Runtime

from .models import WithUnused

QUIET = Runtime(line_every=None)
PER_SAMPLE_S = (0.0005, 0.002)  # by rank
SIZES = [2, 6, 12]
MODEL = "Timed of 5 parameters (float32)"


class Restless(Dataset):
    """Numbered samples, drawn from every random state there is."""

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = random.random() + np.random.random() + torch.rand(()).item()
        return torch.full((6,), index / 36) + noise * torch.arange(6), index


class Counting(nn.Module):
    """Two kinds of buffers, one of which each forward replaces, and numbers drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 5)
        )
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + len(x)
        return self.layers(x) + 0.01 * self.count


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "buffers and randomness": (Counting, {}),
    "unused parameters, bucket views": (
        WithUnused,
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ),
}


def trained(case: str, *, profiled: bool) -> dict[str, Any]:
    """Train an epoch on two ranks under given sizes; return all that could tell a difference."""
    make, options = CASES[case]
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(2)
    model = DistributedDataParallel(make(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stock = DataLoader(Restless(), batch_size=6, shuffle=True)
    losses, seen = [], []

    def loss_of(batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1] % 5)

    with warnings.catch_warnings(), Balancer(policy=Fixed((8, 4)), runtime=QUIET) as balancer:
        warnings.simplefilter("ignore")  # about local BatchNorm
        net, loader = balancer.prepare(model, stock)
        assert net is model
        if profiled:
            balancer.profile(loss_of, sizes=SIZES, repeats=2)
        for batch in loader:
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seen += batch[1].tolist()
    return {
        "state": {name: value.clone() for name, value in model.module.state_dict().items()},
        "losses": losses,
        "seen": seen,
        "draws": (random.random(), np.random.random(), torch.rand(()).item()),
    }


def twice(rank: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return every case without a profile and with one."""
    return {case: (trained(case, profiled=False), trained(case, profiled=True)) for case in CASES}


class Timed(nn.Module):
    """A layer that takes its time, and room for ``most`` samples."""

    def __init__(self, per_sample_s: float, most: int = 1000) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("shared", torch.zeros(1))  # DDP broadcasts it in a first forward
        self.per_sample_s, self.most, self.sizes = per_sample_s, most, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sleep(0.002 + len(x) * self.per_sample_s)
        return self.layer(x)


def begun(
    rank: int,
    path: str | None = None,
    state: Any = None,
    most: int = 1000,
) -> dict[str, Any]:
    """Profile (unless there is a state) and train a step; rank 0 holds ``most`` samples."""
    events: list[Any] = []
    inner = Timed(PER_SAMPLE_S[rank], most if rank == 0 else 1000)
    runtime = Runtime(line_every=None, hooks=(events.append,))
    profile = None
    with Balancer(runtime=runtime) as balancer:
        stock = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=20)
        model, loader = balancer.prepare(inner, stock)
        if state is not None:
            balancer.load_state_dict(state)
        else:
            profile = balancer.profile(lambda batch: model(batch[0]).mean(), path=path)
        profiled = list(inner.sizes)
        kept = balancer.state_dict()
        for (x,) in loader:
            model(x).mean().backward()
            sizes = balancer.batch_sizes
            break
    return {
        "profile": profile,
        "profiled": profiled,
        "state": kept,
        "sizes": sizes,
        "restored": [event.policy for event in events if isinstance(event, EstimatesRestored)],
    }


def runs(rank: int, folder: str) -> dict[str, Any]:
    """Return runs that measure, find a file, load a state, lack room, and find half a file."""
    path = str(Path(folder) / "new" / "profile.json")
    first = begun(rank, path)
    found = begun(rank, path)
    restored = begun(rank, state=first["state"])
    short = begun(rank, most=14)
    one = ClusterProfile(first["profile"].workers[:1], first["profile"].profiles[:1], model=MODEL)
    if rank == 0:
        Path(path).write_text(one.to_json())
    return {
        "first": first,
        "found": found,
        "restored": restored,
        "short": short,
        "partly": begun(rank, path),
    }


def mistakes(rank: int) -> dict[str, str]:
    """Return what is said where one rank fails, and where a forward waits for others."""
    texts = {}

    def stock() -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)

    def fails(batch: Any) -> torch.Tensor:
        if rank == 1:
            raise KeyError("labels")
        return model(batch[0]).mean()

    with Balancer(runtime=QUIET) as balancer:
        model, _ = balancer.prepare(nn.Linear(4, 4), stock())
        for name, closure in (("one fails", fails), ("no room", out_of_room(rank))):
            try:
                balancer.profile(closure)
            except (RuntimeError, KeyError) as error:
                texts[name] = f"{type(error).__name__}: {error}"
    with Balancer(runtime=QUIET) as balancer:
        model, _ = balancer.prepare(fully_shard(nn.Linear(4, 4)), stock())
        try:
            balancer.profile(lambda batch: model(batch[0]).mean())
        except ValueError as error:
            texts["sharded"] = str(error)
    static = DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    with Balancer(runtime=QUIET) as balancer:
        model, _ = balancer.prepare(static, stock())
        try:
            balancer.profile(lambda batch: model(batch[0]).mean())
        except ValueError as error:
            texts["static graph"] = str(error)
    return texts


def out_of_room(rank: int) -> Any:
    """Return a closure for which rank 0 has no room at all."""
    weight = torch.zeros(1, requires_grad=True)

    def closure(batch: Any) -> torch.Tensor:
        if rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return weight.sum()

    return closure


def alone(closure=None, *, stock=None, model=None, bounds=None, memory=None, **asked):
    """Profile in this process alone; return the profile and the sizes that were run."""
    model, sizes = model or nn.Linear(4, 2), []
    stock = stock or DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=16)

    def forward(batch):
        sizes.append(len(batch[0]))
        if memory is not None:
            memory.peak = max(memory.peak, 1000 + 100 * len(batch[0]))
        return model(batch[0]).square().mean()

    runtime = Runtime(line_every=None, memory=memory)
    with Balancer(16, bounds=bounds or Bounds(), runtime=runtime) as balancer:
        model, _ = balancer.prepare(model, stock)
        return balancer.profile(closure or forward, **asked), sizes
