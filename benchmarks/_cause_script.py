"""A training of plain DDP whose ranks take the times that were drawn for them: a user's script.

`benchmarks.causes` starts it with torchrun, under `evenstep watch`, and knows what was done to it.
Most of a step is slept; what a cause is made of is real: garbage is collected, something is
compiled, a file is saved, pages are read from a disk.
"""

import gc
import json
import mmap
import os
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from evenstep._diagnosis import Phase

_BATCH_SIZE = 8
_PAGE = mmap.PAGESIZE


class Played:
    """What a rank does in each step, in seconds.

    Args:
        arrays: of the run, as `benchmarks._played` wrote them.
        rank: this process's.
        disk: a file to read pages from.

    Attributes:
        step: the one under way.
        arrived_s: when its own backward was over, by step.
        left_s: when the exchange after it was.
    """

    def __init__(self, arrays: Any, rank: int, disk: Path) -> None:
        self.own_s = arrays["own_us"][:, rank] / 1e6
        self.exchange_s = arrays["exchange_us"] / 1e6
        self.collected_s = arrays["collected_us"][:, rank] / 1e6
        self.compiled_s = arrays["compiled_us"][:, rank] / 1e6
        self.size = arrays["size"][:, rank].astype(int)
        self.pages = arrays["pages"][:, rank].astype(int)
        self.compiles = bool(arrays["compiled_us"].any())
        if self.compiles:  # a run before this one has left entries, which count up to the limit
            torch.compiler.reset()
        self.step = 0
        self.arrived_s: list[float] = []
        self.left_s: list[float] = []
        self._shape = 1
        self._compile_s = 0.0
        self._disk = disk

    @property
    def num_steps(self) -> int:
        """Steps of the run."""
        return len(self.own_s)

    def lasts(self, phase: Phase) -> float:
        """Return how long a phase lasts in this step."""
        return float(self.own_s[self.step, phase])

    def collect(self, most_s: float) -> float:
        """Collect garbage for as long as was drawn, or as there is room; return the seconds."""
        lasts_s = min(float(self.collected_s[self.step]), most_s)
        if lasts_s < 1e-3:
            return 0.0
        began_s = perf_counter()
        while perf_counter() - began_s < lasts_s:
            garbage: list[Any] = [_Slow(lasts_s - (perf_counter() - began_s))]
            garbage.append(garbage)
            del garbage
            gc.collect()
        return perf_counter() - began_s

    def compile(self) -> None:
        """Compile something that lasts as long as was drawn."""
        if not self.compiles:
            return
        self._compile_s = float(self.compiled_s[self.step])
        if self._compile_s or not self.step:
            self._shape += 1
            torch._dynamo.config.recompile_limit = self._shape + 8
            torch.compile(_doubled, backend=self._compiled, dynamic=False)(torch.ones(self._shape))

    def _compiled(self, graph: Any, inputs: Any) -> Any:
        sleep(self._compile_s)
        return graph.forward

    def read_pages(self) -> None:
        """Read pages that no cache has."""
        number = int(self.pages[self.step])
        if not number:
            return
        with open(self._disk, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
                pages.madvise(mmap.MADV_RANDOM)
                last = len(pages) // _PAGE - 1
                for place in np.linspace(0, last, min(number, last), dtype=int):
                    pages[int(place) * _PAGE]


class _Slow:
    """What takes its time to be freed."""

    def __init__(self, lasts_s: float) -> None:
        self.lasts_s = lasts_s

    def __del__(self) -> None:
        sleep(max(0.0, self.lasts_s))


class _SlowFile(BytesIO):
    """A file on a slow disk."""

    lasts_s = 0.0

    def flush(self) -> None:
        sleep(self.lasts_s)
        self.lasts_s = 0.0


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class _SleepsBackward(torch.autograd.Function):
    """The identity, whose backward takes as long as was drawn."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, played: Played, rest_s: float) -> torch.Tensor:
        ctx.played, ctx.rest_s = played, rest_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        played = ctx.played
        lasts_s = played.lasts(Phase.BACKWARD)
        lasts_s -= played.collect(min(lasts_s, ctx.rest_s))
        sleep(max(0.0, lasts_s))
        played.arrived_s.append(perf_counter())
        return grad, None, None


class Model(nn.Module):
    """A layer, and sleep."""

    def __init__(self, played: Played) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.played = played

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return something with a gradient, in due time."""
        played = self.played
        began_s = perf_counter()
        due_s = played.lasts(Phase.FORWARD)
        wanted_s = float(played.collected_s[played.step])
        collected_s = played.collect(due_s)
        played.compile()
        played.read_pages()
        y = self.layer(tokens[:, :1].expand(-1, 8).float())
        sleep(max(0.0, due_s - (perf_counter() - began_s)))
        found: torch.Tensor = _SleepsBackward.apply(y, played, max(0.0, wanted_s - collected_s))
        return found


class Batches(IterableDataset[torch.Tensor]):
    """Tokens, read in due time."""

    def __init__(self, played: Played) -> None:
        self.played = played

    def __iter__(self) -> Iterator[torch.Tensor]:
        played = self.played
        for step in range(played.num_steps):
            sleep(played.lasts(Phase.INPUT) if step else 0.0)
            yield torch.ones(
                _BATCH_SIZE, max(1, played.size[step] // _BATCH_SIZE), dtype=torch.long
            )


class _SleepySGD(torch.optim.SGD):
    """An optimizer that takes as long as was drawn."""

    def __init__(self, model: nn.Module, played: Played) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.played = played

    def step(self, closure: Any = None) -> Any:
        sleep(self.played.lasts(Phase.OPTIMIZER))
        return super().step(closure)


def slow_exchange(played: Played, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the sum of a bucket over all ranks, after as long as was drawn."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None

    def wait(future: torch.futures.Future[Any]) -> torch.Tensor:
        found: torch.Tensor = future.value()[0]
        sleep(float(played.exchange_s[played.step]))
        return found.div_(dist.get_world_size())

    return work.get_future().then(wait)


def train(played: Played) -> None:
    """Go through all steps of a run."""
    model = DistributedDataParallel(Model(played))
    model.register_comm_hook(played, slow_exchange)
    optimizer = _SleepySGD(model, played)
    for tokens in DataLoader(Batches(played), batch_size=None):
        model(tokens).sum().backward()
        played.left_s.append(perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        if (lasts_s := played.lasts(Phase.CHECKPOINT)) > 0:
            file = _SlowFile()
            file.lasts_s = lasts_s
            torch.save(model.state_dict(), file)
        sleep(played.lasts(Phase.REST))
        played.step = min(played.step + 1, played.num_steps - 1)


def main(folder: Path) -> None:
    """Train all runs of a folder, one after the other, each in a process group of its own."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False)
    for name in json.loads((folder / "runs.json").read_text("utf-8")):
        prefix = dist.PrefixStore(name, store)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size)
        with np.load(folder / f"{name}.npz") as arrays:
            played = Played(arrays, rank, folder / "pages")
        dist.barrier()
        train(played)
        np.savez(folder / f"{name}-{rank}.npz", arrived_s=played.arrived_s, left_s=played.left_s)
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
