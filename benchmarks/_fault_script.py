"""A script as people write it, in which one rank fails at a given point: a cell of the matrix.

Run once for each rank, by torchrun or with its environment: ``_fault_script.py FOLDER POINT KIND
VICTIM WRAP``. In the folder it leaves when the fault came (``struck``), and of each rank its
process and when it came to the script's ``finally``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from evenstep.torch import Balancer, Bounds, Checkpoint, Runtime

BOUNDS = Bounds(min=2)  # BatchNorm refuses a single sample
RUNTIME = Runtime(deadline_s=4.0, heartbeat_s=0.5, hang_s=6.0, line_every=None)
Strike = Callable[[str], None]


class Samples(Dataset[tuple[torch.Tensor]]):
    """Random features, which may be the place of the fault.

    Attributes:
        point: what the data set is asked for at the moment; empty if that is no point.
    """

    def __init__(self, strike: Strike) -> None:
        self.point = ""
        self._strike = strike
        self._x = torch.randn(72, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        self._strike(self.point)
        return (self._x[index],)


class Part:
    """Something of the user's that a checkpoint holds, which may be the place of the fault."""

    def __init__(self, strike: Strike) -> None:
        self._strike = strike

    def state_dict(self) -> dict[str, Any]:
        """Return a state that says nothing."""
        self._strike("save")
        return {"number": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it up."""
        self._strike("load")


def model_of(wrap: str, *, buffers: bool) -> Any:
    """Return a small model, the same on all ranks, with buffers that DDP broadcasts or without."""
    torch.manual_seed(0)
    between = nn.BatchNorm1d(8) if buffers else nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 2))
    if wrap == "ddp":
        return DistributedDataParallel(model)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def train(
    balancer: Balancer,
    folder: Path,
    strike: Strike,
    *,
    wrap: str = "ddp",
    buffers: bool = False,
) -> None:
    """Pass every point once.

    Args:
        balancer: new, and closed by the caller.
        folder: of the checkpoints.
        strike: called at every point with its name; those of ``benchmarks._fault_cells``, and
            ``"forward 0"`` and so on before the forward of a step, ``"data set of evaluation"``.
        wrap: ``"ddp"`` or ``"fsdp2"``.
        buffers: whether the model has any.
    """
    model, data = model_of(wrap, buffers=buffers), Samples(strike)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strike("prepare")
    data.point = "in prepare"
    model, loader = balancer.prepare(model, DataLoader(data, batch_size=4, shuffle=True))
    held_out = balancer.prepare_eval(DataLoader(data, batch_size=4))
    data.point = ""
    parts = {"others": {"part": Part(strike)}, "balancer": balancer}
    checkpoint = Checkpoint(folder, model=model, optimizer=optimizer, loader=loader, **parts)
    checkpoint.load()
    strike("before the loop")
    for step, batches in enumerate(steps_of(loader, wrap)):
        for (x,) in batches:
            strike(f"forward {step}")
            if buffers and step == 3:
                strike("buffers")
            loss = model(x).square().mean()
            strike(f"step {step}")
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            data.point = "data set of evaluation"
            between_steps(balancer, model, held_out, loss.detach(), strike)
            checkpoint.save(step)
            data.point = "data set"
    data.point = ""
    strike("end of run")


def steps_of(loader: Any, wrap: str) -> Iterator[Iterable[Any]]:
    """Yield the batches of each step: one in a plain loop, micro-batches under FSDP2."""
    if wrap == "ddp":
        yield from ([batch] for batch in loader)
    else:
        yield from loader.steps()


def between_steps(
    balancer: Balancer, model: Any, held_out: Any, loss: torch.Tensor, strike: Strike
) -> None:
    """Do what scripts do between two steps: log, wait for the others, reduce, evaluate."""
    strike("mean")
    balancer.mean(loss)
    strike("barrier")
    dist.barrier()
    strike("all_reduce")
    dist.all_reduce(torch.ones(3))
    model.eval()  # a rank may have a single sample left, which BatchNorm refuses in training
    with torch.no_grad():
        for (x,) in held_out:
            strike("evaluation")
            held_out.add("loss", model(x).square().mean())
    model.train()
    held_out.mean()


def striking(folder: Path, *, point: str, kind: str) -> Strike:
    """Return what makes this rank fail when it first comes to a point, and says when."""

    def strike(here: str) -> None:
        if here != point:
            return
        is_first = not (folder / "struck").exists()
        if is_first:
            write_now(folder / "struck")
        if kind == "raise":  # every time: `prepare` asks a data set again
            raise ValueError("sample 17 has no label")
        if not is_first:
            return
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        while True:
            sleep(0.05)

    return strike


def write_now(path: Path) -> None:
    """Write the time, monotonic seconds, into a file that is there with it or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(str(monotonic()))
    partial.replace(path)


def spared(here: str) -> None:
    """Be a rank to which nothing happens."""


def main(folder: Path, point: str, kind: str, victim: int, wrap: str) -> None:
    """Train as a cell says."""
    faulthandler.register(signal.SIGUSR1)  # for who wants to know where it is stuck
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    strike = striking(folder, point=point, kind=kind) if rank == victim else spared
    checkpoints = folder / "checkpoints"
    if point == "load":  # there has to be one
        with Balancer(bounds=BOUNDS, runtime=RUNTIME) as balancer:
            train(balancer, checkpoints, spared, wrap=wrap)
    with Balancer(bounds=BOUNDS, runtime=RUNTIME) as balancer:
        try:
            train(balancer, checkpoints, strike, wrap=wrap, buffers=point == "buffers")
        finally:
            write_now(folder / f"finally-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
