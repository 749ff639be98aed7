"""What the workers of the exactness matrix run: one step each, beside one process with it all.

An axis more is a field of ``Case`` with a default and a few lines in ``balanced`` and ``plain``.
In the cells of ``CASES``, each value of an axis of ``EVERY`` meets each value of every other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime

from .units import causal_lm

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
    compiled: bool = False
    tokens: bool = False  # a mean over them, else over samples

    def __str__(self) -> str:
        words = [self.wrap, self.loop, "bf16" if self.amp else "fp64"]
        words += ["compile"] * self.compiled + ["tokens"] * self.tokens + ["clip"] * self.clip
        return ", ".join(words)

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


LOOPS = ("plain", "size", "count")
EVERY = [Case(*cell) for cell in itertools.product(("ddp", "fsdp2"), LOOPS, *[(False, True)] * 4)]
# Wrapper, loop, AMP, clipping: in these six, each value of one meets each value of any other.
PAIRS = (
    ("ddp", "plain", False, False),
    ("ddp", "size", False, True),
    ("ddp", "count", True, False),
    ("fsdp2", "plain", True, True),
    ("fsdp2", "size", True, False),
    ("fsdp2", "count", False, True),
)
COVERING = [
    Case(*cell, compiled, tokens)
    for compiled, tokens in itertools.product((False, True), repeat=2)
    for cell in PAIRS
]
CASES = [case for case in EVERY if not (case.compiled or case.tokens or case.clip)]
CASES += [case for case in COVERING if case not in CASES]
CASES += [Case("fsdp2 bf16", loop, amp=True) for loop in LOOPS]
CASES += [Case("fsdp2 bf16", amp=True, clip=True, compiled=True, tokens=True)]


class Errors(NamedTuple):
    """Relative errors against one process in double precision.

    Attributes:
        ours: under an uneven plan.
        equal: of plain training at the equal split, for mixed precision alone.
    """

    ours: float
    equal: float | None


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


class TokenNet(nn.Module):
    """Twelve tokens to scores of the next ones, with a look at the two before."""

    loss_type = "ForCausalLM"  # as a model of transformers says that it shifts labels

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 16, 3)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Conv1d(16, 11, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        before = functional.pad(self.embedding(tokens).transpose(1, 2), (2, 0))
        seen = torch.tanh(self.norm(self.conv(before).transpose(1, 2)))
        return self.head(seen.transpose(1, 2)).transpose(1, 2).contiguous()  # FSDP2 likes no views


def network(dtype: torch.dtype, kind: type[nn.Module] = Net) -> nn.Module:
    """Return the same weights everywhere."""
    torch.manual_seed(0)
    return kind().double().to(dtype)


def samples(dtype: torch.dtype) -> TensorDataset:
    """Return features and classes."""
    generator = torch.Generator().manual_seed(1)
    count = NUM_STEPS * WORLD_SIZE * BATCH_SIZE
    x = torch.randn(count, 12, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(5, (count,), generator=generator))


class Texts(Dataset):
    """Rows of tokens that are their own labels, as for causal models; late rows are longer.

    Padding follows what is valid: 1 to 12 tokens, of which the first is no target.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        count, place = NUM_STEPS * WORLD_SIZE * BATCH_SIZE, torch.linspace(0.2, 1.0, 24)
        self.tokens = torch.randint(11, (count, 12), generator=generator)
        lengths = 12 * torch.rand(count, generator=generator) * place.repeat(NUM_STEPS)
        padding = torch.arange(12) >= lengths.ceil()[:, None]
        self.labels = self.tokens.masked_fill(padding, -100)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def data(case: Case) -> Dataset:
    """Return what the case trains on."""
    return Texts() if case.tokens else samples(case.dtype)


def loss_of(case: Case, model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean over a batch."""
    if case.tokens:
        return causal_lm(model, batch)
    x, y = batch
    return functional.cross_entropy(model(x), y)


def wrapped(model: nn.Module, wrap: str, *, layers: bool = True) -> nn.Module:
    """Return the model in DDP, or sharded: layer by layer, or as one."""
    if wrap == "ddp":
        return DistributedDataParallel(model)
    policy = MixedPrecisionPolicy()
    if wrap == "fsdp2 bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in list(model.children()) if layers else []:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def made(case: Case, backend: Any) -> nn.Module:
    """Return the network in its wrapper, compiled as docs/compile.md recommends for it."""
    model = network(case.dtype, TokenNet if case.tokens else Net)
    if not case.compiled:
        return wrapped(model, case.wrap)
    torch._dynamo.reset()  # another case's graphs would count towards the limit
    compiled = partial(torch.compile, backend=backend, fullgraph=True)
    if case.wrap == "ddp":
        return wrapped(compiled(model), case.wrap)
    # Hooks of sharded layers would leave to the graphs only what lies between them.
    return compiled(wrapped(model, case.wrap, layers=False))


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


def plain_steps(case: Case, *, world_size: int, rank: int) -> Iterator[tuple[Any, float]]:
    """Yield this rank's part of every step at the equal split, and what its loss weighs there."""
    num_rows = WORLD_SIZE * BATCH_SIZE // world_size
    rows = slice(rank * num_rows, (rank + 1) * num_rows)
    for batch in DataLoader(data(case), batch_size=WORLD_SIZE * BATCH_SIZE):
        if case.tokens:
            part = {name: column[rows] for name, column in batch.items()}
            here, all_ranks = ((b["labels"][:, 1:] != -100).sum() for b in (part, batch))
            yield part, float(world_size * here / all_ranks)  # DDP divides by the ranks
        else:
            yield [column[rows] for column in batch], 1.0


def plain(case: Case, model: nn.Module, *, world_size: int, rank: int) -> list[torch.Tensor]:
    """Return every step's gradient without evenstep."""
    found = []
    for batch, weight in plain_steps(case, world_size=world_size, rank=rank):
        with autocast(case):
            loss = loss_of(case, model, batch)
        (weight * loss).backward()
        found.append(finish(model, case))
        model.zero_grad()
    return found


def balanced(case: Case, model: nn.Module) -> list[torch.Tensor]:
    """Return every step's gradient under an uneven plan."""
    found = []
    stock = DataLoader(data(case), batch_size=BATCH_SIZE)
    unit = "tokens" if case.tokens else "samples"
    with Balancer(policy=Fixed(UNEVEN), bounds=case.bounds, unit=unit, runtime=QUIET) as balancer:
        model, loader = balancer.prepare(model, stock)
        for step in loader.steps() if case.loop != "plain" else ([batch] for batch in loader):
            for batch in step:
                with autocast(case):
                    loss = loss_of(case, model, batch)
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


def errors_of(case: Case, rank: int, backend: str = "aot_eager") -> Errors:
    """Return the error under an uneven plan, and that of plain AMP at the equal split.

    A compiled case runs in its graph alone: torch raises where it would break it or give up.
    """
    import torch._dynamo.testing

    exact = Case(loop=case.loop, clip=case.clip, tokens=case.tokens)
    kind = TokenNet if case.tokens else Net
    alone = plain(exact, network(torch.float64, kind), world_size=1, rank=0)
    equal, counter = None, torch._dynamo.testing.CompileCounterWithBackend(backend)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        ours = error(balanced(case, made(case, counter)), alone)
        assert (counter.frame_count > 0) == case.compiled
        if case.amp:
            stock = plain(case, made(case, counter), world_size=WORLD_SIZE, rank=rank)
            equal = error(stock, alone)
    return Errors(ours, equal)


def all_errors(rank: int, cases: Sequence[Case]) -> dict[Case, Errors]:
    """Return both errors of each case."""
    return {case: errors_of(case, rank) for case in cases}
