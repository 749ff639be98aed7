"""Cells of several ranks: what balancing costs and brings, how late it is, and whether it is exact.

Ranks have a card each and the backend of such cards, NCCL for CUDA, if there are enough cards.
Otherwise they share the first one, or the CPU, over gloo.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._common import bootstrap_median, progress
from benchmarks._gpu_device import CPU, Effort, NotRun, num_cards, spread, synchronize
from benchmarks._gpu_models import Workload, beside_a_cpu, gpt
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

QUIET = Runtime(line_every=None)
LIMIT_S = 3600.0  # of a set of ranks: the cell's own limit comes first


@dataclass(frozen=True)
class Place:
    """Where ranks compute, and how they are connected.

    Attributes:
        devices: by rank.
        backend: of their process group.
        store: file in which they meet, if that is not gloo.
    """

    devices: tuple[torch.device, ...]
    backend: str
    store: str

    def join(self, rank: int) -> torch.device:
        """Take this rank's device, join the others, and return the device."""
        device = self.devices[rank]
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        if self.backend != "gloo":  # in place of the group that `run_workers` made
            dist.destroy_process_group()
            world_size = len(self.devices)
            keys = dist.FileStore(self.store, world_size)  # type: ignore[attr-defined]
            dist.init_process_group(
                self.backend, store=keys, rank=rank, world_size=world_size, device_id=device
            )
        return device

    def told(self) -> dict[str, Any]:
        """Return it in words."""
        return {"devices": [str(one) for one in self.devices], "backend": self.backend}


def run_at(devices: tuple[torch.device, ...], function: Any, *arguments: Any, **how: Any) -> Any:
    """Return the results of ``function(rank, place, *arguments)`` of each rank, and the place.

    Args:
        devices: by rank. Where all are cards, and no two the same, they use their own backend.
        function: is run by every rank.
        arguments: handed on.
        how: for ``run_workers``.
    """
    own = len(set(devices)) == len(devices) and all(one.type != "cpu" for one in devices)
    backend = dist.get_default_backend_for_device(devices[0]) if own else "gloo"
    if not dist.is_backend_available(backend):
        backend = "gloo"
    with tempfile.TemporaryDirectory() as folder:
        place = Place(devices, backend, str(Path(folder) / "store"))
        settings = {"timeout_s": LIMIT_S, **how}
        return run_workers(len(devices), function, place, *arguments, **settings), place


def spread_over(device: torch.device, world_size: int) -> tuple[torch.device, ...]:
    """Return a card for each rank if there are as many, else the same device for all."""
    if num_cards(device) >= world_size:
        return tuple(torch.device(device.type, index) for index in range(world_size))
    return (device,) * world_size


def loader_of(workload: Workload, num: int, batch_size: int, device: torch.device) -> Any:
    """Return torch's own loader of random samples, in pinned memory for a card."""
    samples = TensorDataset(*workload.batch(num))
    return DataLoader(samples, batch_size=batch_size, pin_memory=device.type != "cpu")


def moved(batch: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Return a batch on the device, without waiting for it."""
    return tuple(one.to(device, non_blocking=True) for one in batch)


class Repeated(nn.Module):
    """A model whose forward is computed several times over: a slower device.

    Args:
        inner: the model.
        times: how often; all but the last without a graph for the backward.
    """

    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times - 1):
            with torch.no_grad():
                self.inner(x)
        return self.inner(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Contest:
    """Contestants that train in turn, a block of steps each, in the same processes.

    Attributes:
        names: "plain" and whatever begins with it is plain DDP; others are balanced.
        workload: what is trained.
        batch_size: samples of each rank at equal sizes.
        repeats: forwards of each rank in place of one.
        rounds: blocks of each contestant that count.
        warm_up: blocks before.
        steps: in a block.
        threads: of a rank on the CPU.
    """

    names: tuple[str, ...]
    workload: Workload
    batch_size: int
    repeats: tuple[int, ...]
    rounds: int
    warm_up: int
    steps: int
    threads: int = 1

    @property
    def num_steps(self) -> int:
        """Steps of each contestant."""
        return (self.rounds + self.warm_up) * self.steps


def train(rank: int, place: Place, contest: Contest) -> tuple[dict[str, list[float]], Any]:
    """Return seconds of a step by contestant and block that counts, and the last sizes."""
    device = place.join(rank)
    torch.set_num_threads(contest.threads)
    torch.manual_seed(0)
    world_size, size = len(place.devices), contest.batch_size
    models: dict[str, Any] = {}
    batches: dict[str, Iterator[Any]] = {}
    with Balancer(runtime=QUIET) as balancer:
        for name in contest.names:
            inner = contest.workload.make().to(device)
            models[name] = DistributedDataParallel(Repeated(inner, contest.repeats[rank]))
            plain = name.startswith("plain")  # which reads its own part
            num = contest.num_steps * size * (1 if plain else world_size)
            loader: Any = loader_of(contest.workload, num, size, device)
            if not plain:
                models[name], loader = balancer.prepare(models[name], loader)
            batches[name] = iter(loader)
        optimizers = {name: torch.optim.AdamW(models[name].parameters()) for name in models}

        def block(name: str) -> float:
            synchronize(device)
            dist.barrier()
            synchronize(device)  # of what NCCL has launched for that
            began_s = perf_counter()
            for _ in range(contest.steps):
                batch = moved(next(batches[name]), device)
                contest.workload.loss(models[name], batch).backward()  # type: ignore[no-untyped-call]
                optimizers[name].step()
                optimizers[name].zero_grad()
            synchronize(device)
            return (perf_counter() - began_s) / contest.steps

        seconds: dict[str, list[float]] = {name: [] for name in contest.names}
        for turn in range(contest.rounds + contest.warm_up):
            for shift in range(len(contest.names)):
                name = contest.names[(turn + shift) % len(contest.names)]
                took_s = block(name)
                if turn >= contest.warm_up:
                    seconds[name].append(took_s)
        sizes = balancer.batch_sizes
        batches.clear()
    return seconds, sizes


def compared(devices: tuple[torch.device, ...], contest: Contest) -> dict[str, Any]:
    """Run a contest; return times, sizes, and the ratio of every contestant to the first."""
    progress(f"{len(devices)} ranks, {contest.rounds} rounds of {contest.steps} steps")
    results, place = run_at(devices, train, contest)
    slowest = {
        name: np.max([seconds[name] for seconds, _ in results], axis=0) for name in contest.names
    }
    first, *others = contest.names
    ratios = {name: slowest[name] / slowest[first] for name in others}
    return {
        **place.told(),
        "model": contest.workload.told,
        "equal_batch_size": contest.batch_size,
        "repeats": contest.repeats,
        "steps_of_a_block": contest.steps,
        "step_s": {name: spread(each.tolist()) for name, each in slowest.items()},
        f"over_{first}": {
            name: {**spread(each.tolist()), "limits_95": bootstrap_median(each)}
            for name, each in ratios.items()
        },
        "batch_sizes": results[0][1],
        "headline": {name: float(np.median(each)) for name, each in ratios.items()}
        | {"batch_sizes": results[0][1]},
    }


def _contest(effort: Effort, workload: Workload, world_size: int, **more: Any) -> Contest:
    settings: dict[str, Any] = {
        "names": ("plain", "balanced", "plain again"),
        "batch_size": 4 if effort.small else 16,
        "repeats": (1,) * world_size,
        "rounds": 3 if effort.small else 12,
        "warm_up": 1 if effort.small else 4,
        "steps": 3 if effort.small else 10,
    }
    return Contest(workload=workload, **settings | more)


def overhead(device: torch.device, effort: Effort, world_size: int) -> dict[str, Any]:
    """Return what balancing costs where there is nothing to balance."""
    contest = _contest(effort, gpt(small=effort.small), world_size)
    return compared(spread_over(device, world_size), contest)


def unlike_ranks(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return what balancing brings three ranks, of which one computes each forward four times."""
    names, repeats = ("plain", "balanced"), (1, 1, 4)
    more = {"names": names, "repeats": repeats, "warm_up": 2 if effort.small else 8}
    contest = _contest(effort, gpt(small=effort.small), 3, **more)
    return compared(spread_over(device, 3), contest)


def beside(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return what balancing brings a card with a CPU beside it, over gloo."""
    if device.type == "cpu" and not effort.small:
        raise NotRun("there is no accelerator for the CPU to be beside")
    contest = _contest(
        effort,
        beside_a_cpu(small=effort.small),
        2,
        names=("plain", "balanced"),
        batch_size=4 if effort.small else 64,
        warm_up=2 if effort.small else 8,
        threads=1 if effort.small else max((os.cpu_count() or 1) // 2, 1),
    )
    return compared((device, CPU), contest)
