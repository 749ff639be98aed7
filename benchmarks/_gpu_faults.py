"""Cells on what goes wrong: memory that runs out for real, and a rank that hangs or is stopped."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._cells import anonymous
from benchmarks._common import progress
from benchmarks._gpu_device import Effort, NotRun, has_doubles, num_cards
from benchmarks._gpu_models import gpt
from benchmarks._gpu_ranks import QUIET, Place, loader_of, moved, run_at, spread_over
from benchmarks._gpu_steps import EXACT
from evenstep.exceptions import WorkerLostError
from evenstep.policies import Equal
from evenstep.testing import WorkerFailed
from evenstep.torch import Balancer, Runtime
from evenstep.torch._memory import is_out_of_memory

NUM_STEPS = 3
STRIKE_AT = 10  # a step
STARTS_S = 120.0  # for processes, a process group and the first steps
DEADLINE_S, HANG_S = 4.0, 8.0
PATIENCE_S = 60.0  # after which a rank that has not noticed has failed to
Fault = Literal["hangs", "is stopped"]


class Wide(nn.Module):
    """Takes much memory for little arithmetic: each sample becomes ``width`` numbers.

    Args:
        width: numbers.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh().mean(1)  # type: ignore[no-any-return]


@contextmanager
def room(device: torch.device, num_bytes: int) -> Iterator[None]:
    """Leave this process so many bytes more than it has, so that its allocator fails past them.

    On a CPU the address space is limited, as ``ulimit -v`` does.
    """
    if device.type == "cpu":
        used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        return
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    share = (torch.cuda.memory_reserved(device) + num_bytes) / total
    torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@contextmanager
def filled(device: torch.device, num_bytes: int) -> Iterator[None]:
    """Leave so many bytes of a card to all processes: the driver itself has no more then."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    ballast = torch.empty(max(free - num_bytes, 0), dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        del ballast
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Short:
    """A training whose first rank is short of memory.

    Attributes:
        world_size: ranks.
        how: where its memory ends: "limited" by ``room``, or "filled" by a ballast.
        batch_size: samples of each rank.
        width: numbers that each becomes.
    """

    world_size: int
    how: Literal["limited", "filled"]
    batch_size: int
    width: int

    def parts(self, device: torch.device) -> tuple[Any, Any, TensorDataset, int]:
        """Return model, optimizer, samples, and bytes that do not hold one layer's output."""
        dtype = torch.float64 if has_doubles(device) else torch.float32
        torch.manual_seed(0)
        model = Wide(self.width).to(device, dtype)
        x = torch.randn(NUM_STEPS * self.batch_size * self.world_size, 8, dtype=dtype)
        samples = TensorDataset(x, x.sum(1).sin())
        short = self.batch_size * self.width * dtype.itemsize * 3 // 4
        return model, torch.optim.SGD(model.parameters(), lr=0.5), samples, short


@dataclass
class Attempts:
    """Forwards and backwards of a step, of which some run out of memory.

    Attributes:
        model: is called.
        device: where.
        num_done: of those that went well.
        errors: of those that did not.
    """

    model: Any
    device: torch.device
    num_done: int = 0
    errors: list[str] = field(default_factory=list)

    def closure(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        with self._noted():
            x, y = moved(batch, self.device)
            return nn.functional.mse_loss(self.model(x), y)

    def through(self, loss: Tensor) -> None:
        """Take its backward."""
        with self._noted():
            loss.backward()  # type: ignore[no-untyped-call]
        self.num_done += 1

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                self.errors.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
            raise


def short_of_memory(rank: int, place: Place, short: Short) -> tuple[list[Tensor], list[str], int]:
    """Return parameters, errors of memory that ran out, and forwards that went well."""
    device = place.join(rank)
    model, optimizer, samples, num_bytes = short.parts(device)
    little = {"limited": room, "filled": filled}[short.how]
    model(samples.tensors[0][:1].to(device)).sum().backward()  # libraries take what they work with
    model.zero_grad()
    with Balancer(policy=Equal(), runtime=QUIET) as balancer:
        called = DistributedDataParallel(model) if short.world_size > 1 else model
        stock: Any = DataLoader(samples, batch_size=short.batch_size)
        called, loader = balancer.prepare(called, stock)
        attempts = Attempts(called, device)
        for step in loader.steps():
            with little(device, num_bytes) if rank == 0 else nullcontext():
                step.backward(attempts.closure, through=attempts.through)
            optimizer.step()
            optimizer.zero_grad()
    parameters = [parameter.detach().cpu() for parameter in model.parameters()]
    return parameters, attempts.errors, attempts.num_done


def with_room(device: torch.device, short: Short) -> list[Tensor]:
    """Return the parameters that one process has after the same samples, in many small parts."""
    model, optimizer, samples, _ = short.parts(device)
    attempts = Attempts(model, device)
    for batch in DataLoader(samples, batch_size=short.batch_size * short.world_size):
        for part in zip(*(each.chunk(32) for each in batch), strict=True):
            attempts.through(attempts.closure(part) * (len(part[0]) / len(batch[0])))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def out_of_memory(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return what becomes of steps that run out of memory: the parameters have to stay the same.

    Two ranks of which the first has an allocator with a limit; and on a card, one rank where the
    card is full.
    """
    if device.type not in ("cpu", "cuda") or not Path("/proc/self/statm").exists():
        raise NotRun(f"memory of {device.type} on this system is limited by nothing known here")
    size, width = (512, 1 << 16) if device.type == "cpu" else (256, 1 << 19)
    cases = [Short(2, "limited", size, width)]
    if device.type == "cuda":
        cases.append(Short(1, "filled", size, width))
    found: dict[str, Any] = {}
    for short in cases:
        name = f"{short.world_size} ranks, {short.how}"
        progress(name)
        wanted = with_room(device, short)
        torch.cuda.empty_cache()
        devices = (device,) * short.world_size
        results, place = run_at(devices, short_of_memory, short)
        (parameters, errors, num_done), *_ = results
        error = max(
            float((one - other).abs().max() / other.abs().max())
            for one, other in zip(parameters, wanted, strict=True)
        )
        found[name] = {
            **place.told(),
            "num_steps": NUM_STEPS,
            "num_out_of_memory": len(errors),
            "errors": sorted(set(errors)),
            "num_forwards": num_done,
            "largest_relative_error": error,
            "met": bool(errors) and error <= (EXACT if has_doubles(device) else 1e-4),
        }
    met = all(each["met"] for each in found.values())
    names = "num_out_of_memory", "num_forwards", "largest_relative_error"
    headline = {n: {key: each[key] for key in names} for n, each in found.items()}
    return {**found, "met": met, "headline": headline}


def struck(rank: int, place: Place, effort: Effort, fault: Fault) -> tuple[str, float]:
    """Return the error that this rank ended with, and after how many seconds."""
    device, workload = place.join(rank), gpt(small=effort.small)
    runtime = Runtime(line_every=None, deadline_s=DEADLINE_S, heartbeat_s=0.5, hang_s=HANG_S)
    began_s = monotonic()
    try:
        with Balancer(runtime=runtime) as balancer:
            model: Any = DistributedDataParallel(workload.make().to(device))
            model, loader = balancer.prepare(model, loader_of(workload, 4000, 4, device))
            for step, batch in enumerate(loader):
                if step == STRIKE_AT:
                    began_s = monotonic()
                if step == STRIKE_AT and rank == 1:
                    _strike(fault)
                workload.loss(model, moved(batch, device)).backward()  # type: ignore[no-untyped-call]
    except WorkerLostError as error:
        return str(error), monotonic() - began_s
    return "", monotonic() - began_s


def _strike(fault: Fault) -> None:
    if fault == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    sleep(10 * PATIENCE_S)


def hang(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return how the other rank ends where one hangs or is stopped, over the cards' own backend."""
    if num_cards(device) == 1:
        raise NotRun("one card: NCCL needs a card for each rank, and this needs two ranks")
    found: dict[str, Any] = {}
    for fault, limit_s in (("hangs", HANG_S), ("is stopped", DEADLINE_S)):
        progress(f"one rank of two {fault}")
        devices, how = spread_over(device, 2), {"check": False, "stop_after": 1}
        results, place = run_at(
            devices, struck, effort, fault, timeout_s=STARTS_S + PATIENCE_S, **how
        )
        if isinstance(results[0], WorkerFailed):
            said, ended_s = str(results[0])[-2000:], None
        else:
            said, ended_s = results[0]
        named = "rank 1" in said.lower() and ended_s is not None
        found[f"a rank that {fault}"] = {
            **place.told(),
            "limit_s": limit_s,
            "ended_s": ended_s,
            "met": named,
            "said": "it names rank 1" if named else anonymous(said),
        }
    headline = {name: each["ended_s"] for name, each in found.items()}
    return {**found, "met": all(each["met"] for each in found.values()), "headline": headline}
