"""An optimizer's state in shares by memory, beside plain DDP, torch's ZeRO-1 and FSDP2.

Three ranks have memory of 1 : 2 : 4. Plain DDP with Adam does not fit the smallest, nor do equal
shares of Adam's state (`ZeroRedundancyOptimizer`); shares in proportion do. The question is whether
they let a model train that FSDP2 does not, and what a step costs. Layers sleep in place of
computing, forward and backward, so that what overlaps with computing can.

Memory is the process's own peak in a step past the first ones (`VmHWM`), without what it had
before the model: Linux only.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks._common import Row, main, progress
from evenstep.advice._memory_needs import memory_needs
from evenstep.testing import run_workers

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes back at once
SHARES, NUM_LAYERS, WIDTH = (1, 2, 4), 16, 704
BYTES_PER_PARAMETER = 11.5  # of the smallest rank: past 8 + 8 / 7 and buffers, not 8 + 8 / 3
WAYS = ("DDP, bucket view", "shares 1 : 2 : 4", "ZeRO-1", "FSDP2, fixed sizes")
NEEDS = {
    "DDP": "ddp_bytes",
    "DDP, bucket view": "ddp_view_bytes",
    "FSDP2, balanced": "fsdp2_steps_bytes",
    "FSDP2, fixed sizes": "fsdp2_bytes",
}
"""What `evenstep plan` computes as well."""


class _Sleep(torch.autograd.Function):
    """An identity that takes some time, twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, compute_s: float) -> torch.Tensor:
        ctx.compute_s = compute_s
        sleep(compute_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        sleep(2 * ctx.compute_s)
        return gradients[0], None


class Layer(torch.nn.Module):
    """A layer with weights to keep, and a device's time."""

    def __init__(self, compute_s: float) -> None:
        """Make the weights."""
        super().__init__()
        self.linear, self.compute_s = torch.nn.Linear(WIDTH, WIDTH), compute_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute, and take the time."""
        return _Sleep.apply(self.linear(x), self.compute_s).tanh()


class OwnedAdam:
    """Adam whose state is kept by the owner of each range, who sends its new parameters to all.

    Make it before DDP wraps the model: parameters become parts of one buffer, so a range goes over
    the links as it lies. Ranges begin at multiples of 64 elements.
    """

    def __init__(self, model: torch.nn.Module, shares: tuple[int, ...]) -> None:
        """Cut the parameters into ranges."""
        parameters = list(model.parameters())
        self.flat = torch.cat([each.detach().flatten() for each in parameters])
        ends = [64 * round(len(self.flat) * s / sum(shares) / 64) for s in accumulate(shares)]
        self.ranges = list(pairwise([0, *ends[:-1], len(self.flat)]))
        low, high = self.ranges[dist.get_rank()]
        self.pieces, begin = [], 0
        for each in parameters:
            end = begin + each.numel()
            each.data = self.flat[begin:end].view_as(each)
            a, b = max(low, begin), min(high, end)
            if a < b:
                self.pieces.append((torch.nn.Parameter(self.flat[a:b]), each, a - begin, b - begin))
            begin = end
        self.optimizer = torch.optim.Adam([piece for piece, *_ in self.pieces])

    def step(self) -> None:
        """Step on this rank's range, and take the others' results."""
        for piece, parameter, low, high in self.pieces:
            assert parameter.grad is not None
            piece.grad = parameter.grad.flatten()[low:high]
        self.optimizer.step()
        sent = [
            dist.broadcast(self.flat[low:high], src=rank, async_op=True)
            for rank, (low, high) in enumerate(self.ranges)
        ]
        for each in sent:
            each.wait()


def model_of(compute_s: float) -> Any:
    """Return layers that take ``compute_s`` together, forward and backward."""
    return torch.nn.Sequential(*(Layer(compute_s / 3 / NUM_LAYERS) for _ in range(NUM_LAYERS)))


def made(way: str, compute_s: float) -> tuple[Any, Any]:
    """Return the model and its optimizer."""
    torch.manual_seed(0)
    model = model_of(compute_s)
    if way.startswith("FSDP2"):
        mesh = init_device_mesh("cpu", (len(SHARES),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.Adam(model.parameters())
    owned = OwnedAdam(model, SHARES) if way.startswith("shares") else None
    model = DistributedDataParallel(model, gradient_as_bucket_view=way != "DDP")
    if way == "ZeRO-1":
        return model, ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True
        )
    return model, owned or torch.optim.Adam(model.parameters())


def stepper(way: str, compute_s: float, rank: int) -> tuple[Callable[[], None], Any, Any]:
    """Return what trains one step, the model and the optimizer."""
    model, optimizer = made(way, compute_s)
    draws = torch.Generator().manual_seed(rank)

    def step() -> None:
        for is_last in (False, True) if way == "FSDP2, balanced" else (True,):
            if way == "FSDP2, balanced":  # as evenstep does: whole between two micro-batches
                model.set_reshard_after_forward(False)
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
            model(torch.randn(4, WIDTH, generator=draws)).square().mean().backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return step, model, optimizer


def remembered(rank: int, way: str) -> tuple[int, int]:
    """Return bytes of Adam's state and of the process's peak in a step."""
    torch.set_num_threads(1)
    warm, *_ = torch.nn.Linear(8, 8), dist.all_reduce(torch.ones(1 << 20))
    warm(torch.ones(1, 8)).sum().backward()
    before = resident("VmRSS")
    step, _, optimizer = stepper(way, 0.0, rank)
    for _ in range(3):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    step()
    peak = resident("VmHWM") - before
    inner = getattr(optimizer, "optimizer", getattr(optimizer, "optim", optimizer))
    kept = [value for state in inner.state.values() for value in state.values()]
    kept = [getattr(value, "_local_tensor", value) for value in kept]
    return sum(each.nbytes for each in kept if each.numel() > 1), peak


def resident(name: str) -> int:
    """Return bytes of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def ulps_apart(rank: int, num_steps: int) -> int:
    """Return the most units in the last place between plain Adam's parameters and the owners'."""
    torch.set_num_threads(1)
    ends = []
    for way in WAYS[:2]:
        step, model, _ = stepper(way, 0.0, rank)
        for _ in range(num_steps):
            step()
        ends.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    first, second = (each.view(torch.int32).long() for each in ends)
    return int((first - second).abs().max())


Blocks = dict[str, list[tuple[float, float]]]


def timed(rank: int, compute_s: float, num_blocks: int, num_steps: int) -> Blocks:
    """Return seconds of a step, and of CPU in it, by blocks in turns within one process group."""
    torch.set_num_threads(1)
    steps = {way: stepper(way, compute_s, rank)[0] for way in WAYS}
    took: Blocks = {way: [] for way in WAYS}
    for number in range(num_blocks + 1):
        for way in WAYS if number % 2 else WAYS[::-1]:
            steps[way]()  # the first after another's block
            dist.barrier()
            began_s, cpu_s = perf_counter(), process_time()
            for _ in range(num_steps):
                steps[way]()
            dist.barrier()
            spent = perf_counter() - began_s, process_time() - cpu_s
            took[way].append((spent[0] / num_steps, spent[1] / num_steps))
    return {way: blocks[1:] for way, blocks in took.items()}  # the first turn warms up


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Say what each way keeps, where it fits, and what a step costs."""
    world_size = len(SHARES)
    for way in ("DDP", *WAYS, "FSDP2, balanced"):
        progress(f"memory: {way}")
        yield memory_row(way, run_workers(world_size, remembered, way))
    progress("results")
    apart = max(run_workers(world_size, ulps_apart, 5 if options.quick else 50))
    yield Row("shares against plain Adam", "at most 1 ulp", {"ulp": apart}, apart <= 1)
    blocks, size = (3, 2) if options.quick else (options.blocks, 2)
    progress(f"time: {blocks} blocks of {size} steps each, in turns")
    took = run_workers(world_size, timed, options.compute_s, blocks, size, timeout_s=900)[0]
    plain = [wall_s for wall_s, _ in took[WAYS[0]]]
    for way in WAYS:
        wall, cpu = zip(*took[way], strict=True)
        ratio = median(own / other for own, other in zip(wall, plain, strict=True))
        figures = {"step_s": median(wall), "of DDP's": ratio, "least_s": min(wall)}
        bar, met = ("at most 1.05", ratio <= 1.05) if way == WAYS[1] else ("reported", None)
        yield Row(f"a step: {way}", bar, figures | {"cpu_s": median(cpu)}, met)


def memory_row(way: str, found: list[tuple[int, int]]) -> Row:
    """Say what each rank keeps, and where it fits."""
    count = sum(each.numel() for each in model_of(0.0).parameters())
    caps = [BYTES_PER_PARAMETER * count * share for share in SHARES]
    fits = [peak <= cap for (_, peak), cap in zip(found, caps, strict=True)]
    part = [state / (8 * count) for state, _ in found]
    figures = {
        "state": " ".join(f"{each:.3f}" for each in part),
        "peak_bytes_per_parameter": " ".join(f"{peak / count:.2f}" for _, peak in found),
        "fits": " ".join("yes" if each else "no" for each in fits),
    }
    if way in NEEDS:
        needs = memory_needs(
            count, len(SHARES), optimizer="adam", dtype="float32", num_layers=NUM_LAYERS
        )
        rest = max(peak for _, peak in found) / count - getattr(needs, NEEDS[way]) / count
        figures["past plan"] = f"{rest:.2f}"
        return Row(f"memory: {way}", "plan's, and at most 2.5 past it", figures, 0 <= rest <= 2.5)
    if way != WAYS[1]:
        return Row(f"memory: {way}", "reported", figures)
    near = all(abs(a * sum(SHARES) / b - 1) <= 0.05 for a, b in zip(part, SHARES, strict=True))
    return Row(f"memory: {way}", "state within 5 % of shares, fits", figures, near and all(fits))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=12, help="blocks of each way")
    parser.add_argument("--compute-s", type=float, default=0.6, help="slept in a step")


if __name__ == "__main__":
    main(__doc__ or "", rows, _options)
