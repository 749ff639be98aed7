"""What the workers of the exactness matrix run: one step each, beside one process with it all.

An axis more is a field of ``Case`` with a default and a few lines in ``balanced`` and ``plain``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime

WORLD_SIZE = 3
BATCH_SIZE = 8  # per rank, at the equal split
UNEVEN = (14, 6, 4)
NUM_STEPS = 4
MAX_NORM = 0.05  # less than any gradient here, so that clipping clips
QUIET = Runtime(line_every=None)


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    wrap: str = "ddp"  # or "fsdp2", or "fsdp2 bf16" with FSDP2's own mixed precision
    loop: str = "plain"  # or "size" or "count": micro-batches of unlike or of one size
    amp: bool = False
    clip: bool = False

    def __str__(self) -> str:
        clip = "clip" if self.clip else "none"
        return f"{self.wrap}, {self.loop}, {'bf16' if self.amp else 'fp64'}, {clip}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.amp else torch.float64

    @property
    def bounds(self) -> Bounds:
        return {
            "plain": Bounds(),
            "size": Bounds(max=5),
            "count": Bounds(vary="count", granularity=2),
        }[self.loop]


CASES = [
    Case(*cell)
    for cell in itertools.product(
        ("ddp", "fsdp2"), ("plain", "size", "count"), (False, True), (False, True)
    )
]
CASES += [Case("fsdp2 bf16", loop, amp=True) for loop in ("plain", "size", "count")]


class Net(nn.Module):
    """Pictures of 12 pixels to class scores, through a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.hidden = nn.Linear(8 * 12, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = functional.gelu(self.norm(self.conv(x[:, None]))).flatten(1)
        return self.head(torch.tanh(self.hidden(seen)))


def network(dtype: torch.dtype) -> nn.Module:
    """Return the same weights everywhere."""
    torch.manual_seed(0)
    return Net().double().to(dtype)


def samples(dtype: torch.dtype) -> TensorDataset:
    """Return features and classes."""
    generator = torch.Generator().manual_seed(1)
    count = NUM_STEPS * WORLD_SIZE * BATCH_SIZE
    x = torch.randn(count, 12, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(5, (count,), generator=generator))


def wrapped(model: nn.Module, wrap: str) -> nn.Module:
    """Return the model in DDP, or sharded layer by layer."""
    if wrap == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy()
    if wrap == "fsdp2 bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in list(model.children()):
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor in one piece."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat(model: nn.Module) -> torch.Tensor:
    """Return all gradients in one vector of double precision."""
    return torch.cat([whole(p.grad).flatten().double() for p in model.parameters()])


def parameters(model: nn.Module) -> torch.Tensor:
    """Return all parameters in one vector."""
    return torch.cat([whole(p.detach()).flatten().double() for p in model.parameters()])


def autocast(case: Case) -> AbstractContextManager[Any]:
    """Return what makes this precision, where it is not the wrapper."""
    wanted = case.amp and case.wrap != "fsdp2 bf16"
    return torch.autocast("cpu", dtype=torch.bfloat16) if wanted else nullcontext()


def finish(model: nn.Module, case: Case) -> torch.Tensor:
    """Return what the optimizer would see; in double precision the norm before clipping too."""
    if not case.clip:
        return flat(model)
    norm = whole(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)).double().reshape(1)
    clipped = flat(model)
    # As large as what it stands beside, so that an error in either shows.
    return clipped if case.amp else torch.cat([clipped, MAX_NORM * norm])


def plain_steps(case: Case, *, world_size: int, rank: int) -> Iterator[tuple[Any, Any]]:
    """Yield this rank's part of every step at the equal split."""
    x, y = samples(case.dtype).tensors
    for first in range(rank * BATCH_SIZE, len(x), WORLD_SIZE * BATCH_SIZE):
        part = slice(first, first + WORLD_SIZE * BATCH_SIZE // world_size)
        yield x[part], y[part]


def plain(case: Case, model: nn.Module, *, world_size: int, rank: int) -> list[torch.Tensor]:
    """Return every step's gradient without evenstep."""
    found = []
    for x, y in plain_steps(case, world_size=world_size, rank=rank):
        with autocast(case):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        found.append(finish(model, case))
        model.zero_grad()
    return found


def balanced(case: Case, model: nn.Module) -> list[torch.Tensor]:
    """Return every step's gradient under an uneven plan."""
    found = []
    stock = DataLoader(samples(case.dtype), batch_size=BATCH_SIZE)
    with Balancer(policy=Fixed(UNEVEN), bounds=case.bounds, runtime=QUIET) as balancer:
        model, loader = balancer.prepare(model, stock)
        for step in loader.steps() if case.loop != "plain" else ([batch] for batch in loader):
            for x, y in step:
                with autocast(case):
                    loss = functional.cross_entropy(model(x), y)
                loss.backward()
            found.append(finish(model, case))
            model.zero_grad()
            assert balancer.batch_sizes == UNEVEN
    return found


def error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Return the relative error over all steps, as the root of the mean square."""
    squares = []
    for mine, plain in zip(ours, theirs, strict=True):
        exact = plain[: len(mine)]  # without the norm, where ours has none beside it
        squares.append(float((mine - exact).norm() / exact.norm()) ** 2)
    return (sum(squares) / len(squares)) ** 0.5


def errors_of(case: Case, rank: int) -> tuple[float, float]:
    """Return the error under an uneven plan, and that of plain training at the equal split."""
    exact = Case(loop=case.loop, clip=case.clip)
    alone = plain(exact, network(torch.float64), world_size=1, rank=0)
    ours = balanced(case, wrapped(network(case.dtype), case.wrap))
    equal = plain(case, wrapped(network(case.dtype), case.wrap), world_size=WORLD_SIZE, rank=rank)
    return error(ours, alone), error(equal, alone)


def all_errors(rank: int) -> dict[str, tuple[float, float]]:
    """Return both errors of every case."""
    return {str(case): errors_of(case, rank) for case in CASES}
