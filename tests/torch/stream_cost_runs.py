"""What the workers of the tests of streams by cost run, and one process beside them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evenstep.torch import Balancer, Checkpoint, Cost

from .cost_runs import BATCH_SIZE, NUM_SAMPLES, Batch, Masked, Series, loss_of, padded, whole
from .stream_runs import QUIET, gradient

Sample = dict[str, Any]


class Stream(IterableDataset[Sample]):
    """Rows of numbers of unlike lengths; loader workers take turns."""

    def __iter__(self) -> Iterator[Sample]:
        info, rows = get_worker_info(), Series()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (sample(rows, index) for index in range(first, NUM_SAMPLES, step))


def sample(rows: Series, index: int) -> Sample:
    return {"number": index, "x": rows[index][1]}


def length(sample: Sample) -> int:
    return len(sample["x"])


def together(samples: list[Sample]) -> Batch:
    return padded([(one["number"], one["x"]) for one in samples])


CAP = 240
CASES = {
    "a field": (Cost("x", padded=True), 0, False),
    "a function, read by workers": (Cost(length, padded=False), 2, False),
    "tokens capped": (Cost("x", padded=True, max_size=CAP), 0, True),
    "samples capped, read by workers": (Cost("x", padded=False, max_samples=5), 2, True),
}


def order(num_workers: int) -> list[int]:
    """Return the samples in the order in which loader workers read them: a batch each, in turn."""
    parts = [range(first, NUM_SAMPLES, num_workers or 1) for first in range(num_workers or 1)]
    begins = range(0, NUM_SAMPLES, BATCH_SIZE)
    return [index for at in begins for part in parts for index in part[at : at + BATCH_SIZE]]


def model() -> nn.Module:
    return Masked()


def reference(numbers: list[int]) -> torch.Tensor:
    """Return the gradient of the mean over these samples, in one process."""
    alone = model()
    batch = together([sample(Series(), number) for number in numbers])
    loss_of(alone, batch, tokens=False).backward()
    return gradient(alone)


def steps(rank: int, names: list[str]) -> dict[str, Any]:
    """Return the samples of every step by rank and forward, the worst error, and the largest."""
    found = {}
    for name in names:
        found[name] = _steps(*CASES[name])
        gc.collect()  # or a forked loader worker frees the last case's DDP, which has threads
    return found


def _steps(cost: Cost, num_workers: int, cuts: bool) -> dict[str, Any]:
    world_size = dist.get_world_size()
    stock = DataLoader(
        Stream(),
        batch_size=BATCH_SIZE // world_size,
        num_workers=num_workers,
        collate_fn=together,
    )
    found, errors, sizes = [], [], [0]
    with Balancer(cost=cost, runtime=QUIET) as balancer:
        ddp, loader = balancer.prepare(model(), stock, stream="same")
        for step in loader.steps() if cuts else ([batch] for batch in loader):
            ddp.zero_grad()
            mine: list[int] = []
            for batch in step:
                loss_of(ddp, batch, tokens=False).backward()
                mine += batch[0].tolist()
                sizes.append(batch[1].shape[0] * batch[1].shape[1])
            mine = mine if balancer.num_samples else []
            everybody: list[Any] = [None] * world_size
            dist.all_gather_object(everybody, mine)
            found.append(everybody)
            theirs = reference([number for part in everybody for number in part])
            errors.append(float((gradient(ddp) - theirs).norm() / theirs.norm()))
    return {"steps": found, "error": max(errors), "largest": max(sizes)}


def train(
    rank: int, *, sharded: bool = False, folder: Path | None = None, stop_after: int | None = None
) -> tuple[torch.Tensor, list[list[list[int]]]]:
    """Train on the stream once; return parameters, and this rank's forwards of each step.

    Args:
        rank: this process.
        sharded: whether the model is sharded by FSDP2.
        folder: of a checkpoint that is loaded, and saved after the last step.
        stop_after: steps, where not all are trained.
    """
    module: Any = model()
    if sharded:
        fully_shard(module)
    size = BATCH_SIZE // dist.get_world_size()
    stock = DataLoader(Stream(), batch_size=size, collate_fn=together)
    with Balancer(cost=Cost("x", padded=True), runtime=QUIET) as balancer:
        net, loader = balancer.prepare(module, stock, stream="same")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        parts = {"model": net, "optimizer": optimizer, "loader": loader}
        checkpoint = None if folder is None else Checkpoint(folder, **parts)
        if checkpoint is not None:
            checkpoint.load()
        seen: list[list[list[int]]] = []
        for step in islice(loader.steps(), stop_after):
            optimizer.zero_grad()
            forwards = []
            for batch in step:
                loss_of(net, batch, tokens=False).backward()
                forwards.append(batch[0].tolist())
            optimizer.step()
            seen.append(forwards if balancer.num_samples else [])
        if checkpoint is not None:
            checkpoint.save(len(seen))
    return torch.cat([whole(value).flatten() for value in net.parameters()]), seen


def alone() -> torch.Tensor:
    """Return the parameters after the same steps in one process without a balancer."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for batch in DataLoader(Stream(), batch_size=BATCH_SIZE, collate_fn=together):
        optimizer.zero_grad()
        loss_of(net, batch, tokens=False).backward()
        optimizer.step()
    return torch.cat([value.detach().flatten() for value in net.parameters()])


class Cropped(Stream):
    """The same, of which each rank crops samples in its own way."""

    def __iter__(self) -> Iterator[Sample]:
        most = 9 + dist.get_rank()
        return ({**one, "x": one["x"][:most]} for one in super().__iter__())


def unlike(rank: int) -> str:
    """Return the error where ranks find other lengths."""
    stock = DataLoader(Cropped(), batch_size=BATCH_SIZE // 2, collate_fn=together)
    with Balancer(cost=Cost("x", padded=True), runtime=QUIET) as balancer:
        _, loader = balancer.prepare(model(), stock, stream="same")
        try:
            next(iter(loader))
        except RuntimeError as error:
            return str(error)
    return "no error"


def refusals(rank: int) -> dict[str, str]:
    """Return the errors of what is not balanced by cost."""
    found = {}
    for name, cost, kind in (
        ("sharded", Cost("x", padded=True), "sharded"),
        ("padded", Cost("x"), "same"),
        ("lengths", Cost([1, 2], padded=True), "same"),
        ("from_batch", Cost(from_batch="x", padded=True), "same"),
        ("field", Cost("y", padded=True), "same"),
        ("cap", Cost("x", padded=True, max_size=2), "same"),
    ):
        stock = DataLoader(Stream(), batch_size=4, collate_fn=together)
        try:
            with Balancer(cost=cost, runtime=QUIET) as balancer:
                _, loader = balancer.prepare(model(), stock, stream=kind)
                next(iter(loader.steps()))
        except ValueError as error:
            found[name] = str(error)
    return found
