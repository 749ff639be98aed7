"""Small runs of every kind, and their checkpoints as any number of ranks would have written them.

One process writes the parts of all ranks, with the planner and the writer that the ranks use.
"""

from __future__ import annotations

import copy
import random
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.utils.data import DataLoader

from evenstep._planner import Job, Planner, Report
from evenstep.policies import by_name
from evenstep.torch import Balancer, Checkpoint
from evenstep.torch._checkpoint import _step_folder as disk
from evenstep.torch._checkpoint._tensors import Tensors
from evenstep.torch._session import Estimates

from .loader_fakes import Items, alone

IN_MEMORY = Path("/dev/shm")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BUFFERS = (torch.int64, torch.bool, torch.uint8, torch.float32, torch.complex64)
OPTIMIZERS = ("none", "sgd", "adamw", "unstarted")
POLICIES = ("auto", "dynamic-batching", "equal", "lb-bsp-2020", "lbb")


@dataclass(frozen=True)
class Kind:
    """What a run consists of: equal kinds load what the other saved.

    Attributes:
        shapes: of the parameters; every other one gets a gradient.
        dtype: of the parameters.
        buffers: shape and dtype of each.
        optimizer: one of ``OPTIMIZERS``.
        in_epoch: whether the loader has begun one; its state is then 5000 numbers long.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    buffers: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    optimizer: str
    in_epoch: bool = False


class Held:
    """Holds one value, as a scheduler would."""

    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Run:
    """Everything that a checkpoint keeps, small, and a way to have it be of some value.

    Args:
        folder: of the checkpoints.
        kind: what it consists of.
    """

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.model = nn.Module()
        for index, shape in enumerate(kind.shapes):
            parameter = nn.Parameter(torch.zeros(shape, dtype=kind.dtype))
            self.model.register_parameter(f"p{index}", parameter)
        for index, (shape, dtype) in enumerate(kind.buffers):
            self.model.register_buffer(f"b{index}", torch.zeros(shape, dtype=dtype))
        self.optimizer = _optimizer(kind.optimizer, self.model)
        self.kind = kind
        self.loader = alone(DataLoader(Items(23), batch_size=4, shuffle=True))
        self.balancer = Balancer()
        self.held = Held()
        self.checkpoint = Checkpoint(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            balancer=self.balancer,
            others={"held": self.held},
            keep=3,
        )

    def go(self, seed: int, value: Any = None) -> Run:
        """Train to where ``seed`` says, and hold ``value``."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            drawn = 9 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.data.copy_(drawn)
        if self.kind.optimizer in ("sgd", "adamw"):
            for parameter in list(self.model.parameters())[::2]:
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.kind.in_epoch:
            list(zip(range(seed % 9), self.loader, strict=False))  # hands out so many batches
        self.balancer.load_state_dict(learnt(seed % 5))
        self.held.value = value
        return self

    def everything(self) -> dict[str, Any]:
        """Return a copy of all that a checkpoint keeps."""
        state = {"model": self.model.state_dict(), **self.parts()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.state_dict()
        return copy.deepcopy(state)

    def parts(self) -> dict[str, Any]:
        """Return what is neither model nor optimizer; a load puts new values there, if any."""
        parts = {"loader": self.loader, "balancer": self.balancer, "held": self.held}
        return {name: part.state_dict() for name, part in parts.items()}

    def write(self, step: int, *, world_size: int, seed: int = 0) -> Path:
        """Save as ``world_size`` ranks would: of a sharded model, or of one that all have whole."""
        checkpoint, root = self.checkpoint, self.checkpoint._root
        path, states = disk.begin(root, step), checkpoint._tensors.collect()
        writer = FileSystemWriter(path, sync_files=False)
        rng = random.Random(seed)
        cuts = [0.0, *sorted(rng.random() for _ in range(world_size - 1)), 1.0]
        sharded = seed % 2 == 0
        ranks = [_Rank((cuts[r], cuts[r + 1]) if sharded else None) for r in range(world_size)]
        for rank in ranks:
            rank.set_up_planner(states, writer.storage_meta(), rank is ranks[0])
        plans, index = ranks[0].create_global_plan([rank.create_local_plan() for rank in ranks])
        writer.set_up_storage_writer(True)
        plans = writer.prepare_global_plan(plans)
        done = [writer.write_data(*pair).wait() for pair in zip(plans, ranks, strict=True)]
        writer.finish(index, done)
        Tensors.save_index(path, index)
        digests = {file.name: disk.digest(file) for file in path.iterdir()}
        disk.write(path / "plain.pt", checkpoint._plain_bytes(step))
        digests["plain.pt"] = disk.digest(path / "plain.pt")
        disk.seal(root, step, world_size=world_size, digests=digests)
        return disk.complete_folder(root, step)


class _Rank(DefaultSavePlanner):
    """What one rank has: from where to where of the rows of every tensor, or all as in DDP."""

    def __init__(self, share: tuple[float, float] | None) -> None:
        super().__init__()
        self.share = share

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if self.share is None:
            return plan
        items = [mine for item in plan.items for mine in self._mine(item)]
        self.plan = replace(plan, items=items)
        return self.plan

    def _mine(self, item: WriteItem) -> list[WriteItem]:
        written = item.tensor_data
        if written is None or not written.size or 0 in written.size:
            return [item]  # no rows to cut: one of the ranks writes all of it
        first, end = (int(part * written.size[0] + 0.5) for part in self.share)
        if first == end:
            return []
        offsets = torch.Size([first, *[0] * (len(written.size) - 1)])
        chunk = ChunkStorageMetadata(offsets, torch.Size([end - first, *written.size[1:]]))
        index = MetadataIndex(item.index.fqn, offsets)
        data = replace(written, chunk=chunk)
        return [replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # torch's
        if write_item.type == WriteItemType.SHARD:
            chunk = write_item.tensor_data.chunk
            return object.narrow(0, chunk.offsets[0], chunk.sizes[0])
        return super().transform_object(write_item, object)


@cache
def learnt(world_size: int) -> dict[str, Any]:
    """Return what a balancer has learnt of so many workers; of none, nothing."""
    if world_size == 0:
        return Estimates().state_dict()
    planner = Planner(by_name(POLICIES[world_size]), Job(world_size, 30))
    for step in range(6):
        reports = [
            Report(step, b, 30, 0.001 + b * 0.001 * (rank + 1), 0.0)
            for rank, b in enumerate(planner.plan.batch_size)
        ]
        planner.observe(reports, next_step=step + 1)
        planner.account(reports, planner.plan)
    workers = [f"n{rank} cpu" for rank in range(world_size)]
    return Estimates(workers, planner.learnt()).state_dict()


def same(one: Any, other: Any) -> bool:
    """Tell whether two nested values are equal, bit by bit and type by type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


@contextmanager
def room() -> Any:
    """An empty folder, in memory where the system has such, and gone afterwards."""
    where = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="evenstep-", dir=where) as folder:
        yield Path(folder)


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer | None:
    parameters = list(model.parameters())
    if name == "none":
        return None
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.1)
