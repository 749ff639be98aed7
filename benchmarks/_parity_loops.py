"""The loops that ``benchmarks.parity`` compares: plain, balanced, and two that torch users have.

All train the same small model with the same batches. Of step k, rank r gets the r-th equal part of
the k-th global batch. A loop does nothing but what a script does: fetch, work, forward, backward,
optimizer.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep, thread_time
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.exceptions import EvenstepWarning
from evenstep.policies import Auto, Deadband
from evenstep.torch import Balancer, Runtime

BATCH_SIZE, NUM_FEATURES, WIDTH = 16, 8, 64
Wrapper = Literal["DDP", "FSDP2"]
Work = Literal["sleeping", "computing"]
Rival = Literal["evenstep", "Join", "even_batches", "nothing"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One pair of loops.

    Attributes:
        wrapper: of the model.
        num_ranks: that train.
        step_s: seconds of the work in a step, beside forward, backward and optimizer.
        work: ``"sleeping"`` leaves the core free; ``"computing"`` multiplies matrices.
        num_workers: of each loader.
        rival: what the second loop adds to the plain one.
        is_compiled: whether both compile their model, within its wrapper.
    """

    wrapper: Wrapper
    num_ranks: int
    step_s: float
    work: Work = "sleeping"
    num_workers: int = 0
    rival: Rival = "evenstep"
    is_compiled: bool = False

    @property
    def name(self) -> str:
        """What it is, in words."""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        words = f"{self.rival}: {self.wrapper}, {ranks}, {1e3 * self.step_s:g} ms {self.work}"
        return f"{words}, {self.num_workers} loader workers" + ", compiled" * self.is_compiled


class Loop:
    """A training loop that stops after each step.

    Args:
        model: in its wrapper, on its device.
        batches: the loader's.
        work: what a step does between its batch and its forward.
        device: of the model.

    Attributes:
        losses: of all steps so far. They stay on the device: nothing waits for them.
    """

    def __init__(
        self, model: nn.Module, batches: Iterator[Any], work: Callable[[], None], device: Any
    ) -> None:
        self._model, self._batches, self._work, self._device = model, batches, work, device
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """Train one step."""
        x, y = next(self._batches)
        self._work()
        x, y = x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)
        loss = nn.functional.mse_loss(self._model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())

    def close(self) -> None:
        """Let go of the batches: the loader's workers end before what watches them."""
        self._batches = iter(())


@contextmanager
def plain_loop(cell: Cell, work: Callable[[], None], num_steps: int, device: Any) -> Iterator[Loop]:
    """Yield the loop as it is without any of the others."""
    loader = loader_of(cell, num_steps, own_part=True)
    yield Loop(wrapped(cell, device), iter(loader), work, device)


@contextmanager
def balanced_loop(
    cell: Cell, work: Callable[[], None], num_steps: int, device: Any
) -> Iterator[Loop]:
    """Yield the loop with a balancer, whose sizes stay equal.

    ``auto`` decides as always, on every measurement. No split into ``num_ranks`` parts differs by
    more from the equal one than this deadband lets pass, so losses compare bit by bit. Without it,
    sizes would wander: the work of a step is the same for any number of samples.
    """
    warnings.filterwarnings("ignore", "FSDP2 waits", EvenstepWarning)  # not measured: it is known
    policy = Deadband(Auto(), threshold=float(cell.num_ranks))
    with Balancer(policy=policy, runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(
            wrapped(cell, device), loader_of(cell, num_steps, own_part=False)
        )
        with closing(Loop(model, iter(loader), work, device)) as loop:
            yield loop


@contextmanager
def join_loop(cell: Cell, work: Callable[[], None], num_steps: int, device: Any) -> Iterator[Loop]:
    """Yield the loop in torch's ``Join``, which waits for ranks that have more batches."""
    model: Any = wrapped(cell, device)
    loader = loader_of(cell, num_steps, own_part=True)
    with join.Join([model]):
        yield Loop(model, iter(loader), work, device)


@contextmanager
def even_batches_loop(
    cell: Cell, work: Callable[[], None], num_steps: int, device: Any
) -> Iterator[Loop]:
    """Yield the loop with Accelerate's loader, which repeats samples until all ranks have some."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    settings = DataLoaderConfiguration(even_batches=True)
    accelerator = Accelerator(cpu=device.type == "cpu", dataloader_config=settings)
    loader = accelerator.prepare(loader_of(cell, num_steps, own_part=False))
    yield Loop(wrapped(cell, device), iter(loader), work, device)


def files_of(rival: Rival) -> str:
    """Return how the paths of its own code begin."""
    if rival == "Join":
        return str(join.__file__)
    if rival == "even_batches":
        import accelerate

        return str(Path(accelerate.__file__).parent) + os.sep
    return os.devnull if rival == "nothing" else str(Path(evenstep.__file__).parent) + os.sep


LOOPS = {
    "evenstep": balanced_loop,
    "Join": join_loop,
    "even_batches": even_batches_loop,
    "nothing": plain_loop,
}
"""By what they add to the plain loop: nothing shows how far from 1 a ratio is by chance."""


@contextmanager
def both_loops(
    cell: Cell, work: Callable[[], None], num_steps: int, device: Any
) -> Iterator[tuple[Loop, Loop]]:
    """Yield the plain loop and the other one, each with batches for so many steps."""
    with (
        plain_loop(cell, work, num_steps, device) as plain,
        LOOPS[cell.rival](cell, work, num_steps, device) as other,
    ):
        yield plain, other


def wrapped(cell: Cell, device: Any) -> nn.Module:
    """Return the model in its wrapper, with the same parameters each time."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).to(
        device
    )
    if cell.wrapper == "FSDP2":
        fully_shard(model, mesh=init_device_mesh(device.type, (cell.num_ranks,)))
    # The graphs are what is counted, so nothing waits for the kernels.
    if cell.is_compiled:
        model = torch.compile(model, backend="aot_eager")
    return DistributedDataParallel(model) if cell.wrapper == "DDP" else model


def loader_of(cell: Cell, num_steps: int, *, own_part: bool) -> DataLoader[Any]:
    """Return a stock loader.

    Args:
        cell: whose.
        num_steps: that it has batches for.
        own_part: whether it has this rank's parts alone, or all, for a library to divide.
    """
    total = cell.num_ranks * BATCH_SIZE
    torch.manual_seed(1)
    data = TensorDataset(
        torch.randn(num_steps * total, NUM_FEATURES), torch.randn(num_steps * total, 1)
    )
    first = dist.get_rank() * BATCH_SIZE
    own = [k * total + first + i for k in range(num_steps) for i in range(BATCH_SIZE)]
    sampler = own if own_part else None
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, num_workers=cell.num_workers)


def work_of(cell: Cell, product_s: float, device: Any) -> Callable[[], None]:
    """Return the work of a step.

    Args:
        cell: says how long it takes.
        product_s: seconds of one ``product``.
        device: that computes.
    """
    if cell.work == "sleeping":
        return partial(sleep, cell.step_s)
    product, repeats = product_on(device), max(1, round(cell.step_s / product_s))

    def compute() -> None:
        for _ in range(repeats):
            product()

    return compute


def product_on(device: Any) -> Callable[[], Any]:
    """Return what multiplies two matrices."""
    matrix = torch.ones(192, 192, device=device)
    return partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))


def seconds_of_a_product(device: Any) -> float:
    """Return rank 0's least seconds of a product, for all ranks: all do the same work.

    On a CPU those of the thread, so that what else runs here makes no step shorter.
    """
    product, clock = product_on(device), thread_time if device.type == "cpu" else perf_counter
    least_s = float("inf")
    for _ in range(10):
        synchronize(device)
        began_s = clock()
        for _ in range(20):
            product()
        synchronize(device)
        least_s = min(least_s, (clock() - began_s) / 20)
    seconds = torch.tensor(least_s, device=device)
    dist.broadcast(seconds, 0)
    return float(seconds)


def synchronize(device: Any) -> None:
    """Wait until a card has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
