"""A run that `torch.distributed.checkpoint` saves, with all that is in it, and one that goes on."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.events import EstimatesRestored
from evenstep.torch import Balancer, Runtime

from .plans import Restless

NUM_SAMPLES, SIZE = 130, 24  # the last step of an epoch is short
NUM_STEPS, SAVED_AFTER = 12, 4  # two epochs; saved in the middle of the first one


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def stock(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(NUM_SAMPLES, 7, generator=generator, dtype=torch.float64)
    order = torch.Generator().manual_seed(2)
    number = torch.arange(NUM_SAMPLES)
    return DataLoader(TensorDataset(number, data), batch_size, shuffle=True, generator=order)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(model: Any, optimizer: Any, schedule: Any, loader: Any) -> Iterator[list[int]]:
    """Train for ever; yield the samples of each step."""
    while True:
        for numbers, data in loader:
            (model(data[:, :5]) - data[:, 5:]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            yield numbers.tolist()


def whole(model: nn.Module) -> torch.Tensor:
    each = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return torch.cat([tensor.detach().flatten() for tensor in each])


def unbroken() -> tuple[list[list[int]], torch.Tensor]:
    """Return the samples of each step of plain training in one process, and its parameters."""
    model = network()
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
    run = steps(model, optimizer, schedule, stock(SIZE))
    return [next(run) for _ in range(NUM_STEPS)], whole(model)


class Run:
    """A prepared model of a kind, and what a checkpoint has of it.

    Args:
        kind: `"ddp"` or `"fsdp2"`.
        size: samples of a step.
    """

    def __init__(self, kind: str, size: int = SIZE) -> None:
        plain = network()
        if kind == "fsdp2":
            for part in (plain[0], plain[2], plain):
                fully_shard(part)
        model = plain if kind == "fsdp2" else DistributedDataParallel(plain)
        self.events: list[Any] = []
        runtime = Runtime(line_every=None, hooks=(self.events.append,))
        self.balancer = Balancer(size, policy=Restless(), runtime=runtime)
        batch_size = -(-size // dist.get_world_size())
        self.model, self.loader = self.balancer.prepare(model, stock(batch_size))
        self.optimizer = optimizer_of(self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.7)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule,
            "loader": self.loader,
            "balancer": self.balancer,
        }

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def steps(self) -> Iterator[list[int]]:
        return steps(self.model, self.optimizer, self.schedule, self.loader)


def saved(rank: int, folder: str, kind: str, background: bool) -> list[list[int]]:
    """Train, save, and train on a little, in the background perhaps; return the samples saved."""
    group = dist.new_group(backend="gloo")
    run = Run(kind)
    with run.balancer:
        samples = run.steps()
        found = [next(samples) for _ in range(SAVED_AFTER)]
        if background:
            save = dcp.async_save(run.state(), checkpoint_id=folder, process_group=group)
            next(samples), next(samples)  # the state is that of the call
            save.result()
        else:
            dcp.save(run.state(), checkpoint_id=folder)
        samples.close()
    return found


def gone_on(rank: int, folder: str, kind: str) -> tuple[list[list[int]], torch.Tensor, list[Any]]:
    """Load into a new run and end it; return samples by step, parameters, and what was known."""
    run = Run(kind)
    with run.balancer:
        run.load(folder)
        samples = run.steps()
        found = [next(samples) for _ in range(SAVED_AFTER, NUM_STEPS)]
        samples.close()
        known = [e.known for e in run.events if isinstance(e, EstimatesRestored)]
        return found, whole(run.model), known


def refusals(rank: int, folder: str) -> dict[str, str]:
    """Return the errors of loading folders that are damaged, and such that fit no run of here."""
    good = f"{folder}/good"
    run = Run("ddp")
    with run.balancer:
        samples = run.steps()
        next(samples), next(samples)
        dcp.save(run.state(), checkpoint_id=good)
        dcp.save({**run.state(), "loader": {}}, checkpoint_id=f"{folder}/without a loader")
        samples.close()
    if rank == 0:
        _cut(Path(shutil.copytree(good, f"{folder}/cut short")))
        _change(Path(shutil.copytree(good, f"{folder}/another position")))
    dist.barrier()
    names = ("cut short", "another position", "without a loader")
    found = {name: _refusal(f"{folder}/{name}") for name in names}
    return {**found, "another batch": _refusal(good, SIZE + 6), "good": _refusal(good)}


def _cut(path: Path) -> None:
    for file in path.glob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)


def _change(path: Path) -> None:
    """Have the checkpoint say that one step of the epoch was taken, where two were."""
    where = (
        dcp.FileSystemReader(path).read_metadata().storage_data[MetadataIndex("loader.steps_taken")]
    )
    file = path / where.relative_path
    content = file.read_bytes()
    entry = content[where.offset : where.offset + where.length]
    changed = entry.replace(pickle.dumps(2, 2)[2:], pickle.dumps(1, 2)[2:])
    assert changed != entry
    file.write_bytes(content[: where.offset] + changed + content[where.offset + where.length :])


def _refusal(folder: str, size: int = SIZE) -> str:
    run = Run("ddp", size)
    with run.balancer:
        try:
            run.load(folder)
        except (ValueError, CheckpointException) as error:
            return f"{type(error).__name__}: {error}"
    return "none"
