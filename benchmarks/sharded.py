"""FSDP2 as it stands, in a plain loop: sizes beside the best ones, own time beside the truth.

Four layers sleep for each row, forward and backward, and are sharded over gloo. Contestants take
turns, step by step, in the same processes: plain FSDP2 with equal batches, a balancer with the best
sizes by hand, and `Balancer()`. So they share the machine's noise, and ratios are of neighbours.

Own time is compared with what was slept and the thread's CPU time, from the batch to the end of
the backward, without the CPU time of collectives. One case computes before it enters the first
gather, which is own time; one sleeps in each gather, as on a slow wire, which is not.

Ranks meet in every layer. Where they are slow in different ones, a step is longer than the longest
sum of a rank, by which steps are predicted: that case is reported, and has no bar.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter, sleep, thread_time
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._common import Row, bootstrap_median, main, progress
from evenstep.events import StepMeasured
from evenstep.policies import Fixed
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

WIDTH, NUM_LAYERS, PER_RANK = 64, 4, 16
WARM_UP = 12  # steps, the first ten of which find the sizes
PLAIN, BY_HAND, OURS = "plain", "by hand", "ours"
WIRE_S = 0.004


@dataclass(frozen=True)
class Cell:
    """One case.

    Attributes:
        name: what it is called.
        row_s: seconds of a row in each layer, forward and backward together, by rank.
        reshards: whether layers give up their parameters after a forward.
        forward: how much of that is in the forward.
        before_s: seconds before the model's forward, for each rank.
        wire_s: seconds that each gather takes on every rank.
    """

    name: str
    row_s: tuple[tuple[float, ...], ...]
    reshards: bool = True
    forward: float = 0.5
    before_s: tuple[float, ...] = (0.0, 0.0)
    wire_s: float = 0.0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.row_s)

    @property
    def best(self) -> tuple[int, ...]:
        """The sizes whose longest sum of a rank is the shortest."""
        speeds = 1 / np.array(self.row_s).sum(axis=1)
        sizes = np.floor(speeds / speeds.sum() * PER_RANK * self.world_size).astype(int)
        while sizes.sum() < PER_RANK * self.world_size:
            sizes[np.argmin((sizes + 1) / speeds)] += 1
        return tuple(sizes.tolist())


def in_all_layers(*row_s: float) -> tuple[tuple[float, ...], ...]:
    """Return ranks that are as slow in each layer."""
    return tuple((each / NUM_LAYERS,) * NUM_LAYERS for each in row_s)


RACE = Cell("speeds 1:1:2:4", in_all_layers(0.020, 0.020, 0.010, 0.005))
EQUAL = Cell("two equal ranks, 60 ms", in_all_layers(0.06 / PER_RANK, 0.06 / PER_RANK))
ODD = Cell("slow in different layers", ((0.003, 0.0005) * 2, (0.0005, 0.003) * 2))
CLOCKS = (
    Cell("speeds 1:2", in_all_layers(0.006, 0.003)),
    Cell("speeds 1:2, not resharded", in_all_layers(0.006, 0.003), reshards=False),
    Cell("all in one layer", ((0.006, 0, 0, 0), (0, 0, 0, 0.003))),
    Cell("all in the forward", in_all_layers(0.006, 0.003), forward=1.0),
    Cell("all in the backward", in_all_layers(0.006, 0.003), forward=0.0),
    Cell("before the first gather", in_all_layers(0.003, 0.003), before_s=(0.040, 0.010)),
    Cell("on the wire", in_all_layers(0.006, 0.003), wire_s=WIRE_S),
)


class Nap(torch.autograd.Function):
    """An identity that sleeps, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Sleep."""
        ctx.layer, ctx.rows = layer, len(x)
        layer.nap(len(x) * layer.row_s * layer.forward_share)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Sleep again."""
        ctx.layer.nap(ctx.rows * ctx.layer.row_s * (1 - ctx.layer.forward_share))
        return grads[0], None


class Layer(nn.Module):
    """A linear layer that sleeps.

    Args:
        row_s: seconds for each row.
        forward_share: how much of that is in the forward.
        slept_s: seconds slept so far, of all layers.
    """

    def __init__(self, row_s: float, forward_share: float, slept_s: list[float]) -> None:
        """Return the layer; the seconds are counted in ``slept_s[0]``."""
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.row_s, self.forward_share, self.slept_s = row_s, forward_share, slept_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, in due time."""
        return torch.tanh(Nap.apply(self.linear(x), self))

    def nap(self, seconds: float) -> None:
        """Sleep, and count how long that took."""
        begin_s = perf_counter()
        if seconds:
            sleep(seconds)
        self.slept_s[0] += perf_counter() - begin_s


def model_of(cell: Cell, rank: int, slept_s: list[float]) -> nn.Module:
    """Return sharded layers that sleep."""
    torch.manual_seed(0)
    layers = [Layer(row_s, cell.forward, slept_s) for row_s in cell.row_s[rank]]
    for layer in layers:
        fully_shard(layer, reshard_after_forward=cell.reshards)
    return fully_shard(nn.Sequential(*layers))


def loader_of(num_steps: int, num_parts: int) -> DataLoader[Any]:
    """Return a stock loader of so many steps, for all ranks or for one."""
    data = TensorDataset(torch.randn(num_steps * PER_RANK * num_parts, WIDTH))
    return DataLoader(data, batch_size=PER_RANK)


def race(rank: int, cell: Cell, num_rounds: int) -> dict[str, Any]:
    """Return seconds of each counted step by contestant, and where `auto` came to."""
    num_steps, names = num_rounds + WARM_UP, (PLAIN, BY_HAND, OURS)
    events: list[StepMeasured] = []

    def hook(event: object) -> None:
        if isinstance(event, StepMeasured):
            events.append(event)

    with ExitStack() as stack:
        models = {name: model_of(cell, rank, [0.0]) for name in names}
        loaders = {name: loader_of(num_steps, cell.world_size) for name in names}
        loaders[PLAIN] = loader_of(num_steps, 1)
        for name, policy in ((BY_HAND, Fixed(cell.best)), (OURS, "auto")):
            hooks = (hook,) if name == OURS else ()
            runtime = Runtime(line_every=None, hooks=hooks)
            balancer = stack.enter_context(Balancer(policy=policy, runtime=runtime))
            models[name], loaders[name] = balancer.prepare(models[name], loaders[name])
        optimizers = {name: torch.optim.SGD(models[name].parameters(), lr=0.0) for name in names}
        batches = {name: iter(loaders[name]) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(num_steps):
            for shift in range(len(names)):
                name = names[(turn + shift) % len(names)]
                dist.barrier()
                began_s = perf_counter()
                (x,) = next(batches[name])
                models[name](x).mean().backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
                if turn >= WARM_UP:
                    seconds[name].append(perf_counter() - began_s)
        sizes = balancer.batch_sizes
    makespans = [event.makespan_s for event in events[WARM_UP:]]
    return {"seconds": seconds, "sizes": sizes, "makespans": makespans}


def clock(rank: int, cell: Cell, num_steps: int) -> tuple[Any, list[float]]:
    """Return what is measured of each rank by step, and this rank's truth."""
    slept_s, met_s, truth, events = [0.0], [0.0], [], []

    def metered(collective: Any, wire_s: float) -> Any:
        def meet(*args: Any, **kwargs: Any) -> Any:
            sleep(wire_s)
            begin_s = thread_time()
            result = collective(*args, **kwargs)
            met_s[0] += thread_time() - begin_s
            return result

        return meet

    def hook(event: object) -> None:
        if isinstance(event, StepMeasured):
            events.append(event.compute_s)

    sizes = Fixed((PER_RANK,) * cell.world_size)
    with ExitStack() as stack:
        for name, wire_s in (("all_gather_single", cell.wire_s), ("reduce_scatter_single", 0.0)):
            meter = metered(getattr(dist, name), wire_s)
            stack.enter_context(patch.object(dist, name, meter))
        runtime = Runtime(line_every=None, hooks=(hook,))
        balancer = stack.enter_context(Balancer(policy=sizes, runtime=runtime))
        model, loader = balancer.prepare(
            model_of(cell, rank, slept_s), loader_of(num_steps + WARM_UP, cell.world_size)
        )
        for (x,) in loader:
            slept_s[0] = met_s[0] = 0.0
            cpu_s = thread_time()
            begin_s = perf_counter()
            sleep(cell.before_s[rank])
            before_s = perf_counter() - begin_s
            model(x).square().mean().backward()
            truth.append(before_s + slept_s[0] + thread_time() - cpu_s - met_s[0])
    return events[WARM_UP:], truth[WARM_UP:]


def race_rows(cell: Cell, num_rounds: int) -> Iterator[Row]:
    """Compare the three, pair by pair."""
    found = run_workers(cell.world_size, race, cell, num_rounds, timeout_s=600)[0]
    seconds = {name: np.array(taken) for name, taken in found["seconds"].items()}
    figures = {"sizes": found["sizes"], "by hand": cell.best}
    over = {name: bootstrap_median(seconds[OURS] / seconds[name]) for name in (BY_HAND, PLAIN)}
    middle = {name: median(seconds[OURS] / seconds[name]) for name in (BY_HAND, PLAIN)}
    if cell is EQUAL:
        yield Row(
            f"{cell.name}: a step over plain FSDP2's",
            "<= 1.01",
            {"median": middle[PLAIN], "limits_95": over[PLAIN], **figures},
            middle[PLAIN] <= 1.01,
        )
    elif cell is RACE:
        yield Row(
            f"{cell.name}: a step over the best sizes by hand",
            "<= 1.05",
            {"median": middle[BY_HAND], "limits_95": over[BY_HAND], **figures},
            middle[BY_HAND] <= 1.05,
        )
        yield Row(
            f"{cell.name}: plain FSDP2's step over ours, 2.0 at most",
            ">= 1.8",
            {"median": 1 / middle[PLAIN], "limits_95": tuple(1 / np.array(over[PLAIN])[::-1])},
            1 / middle[PLAIN] >= 1.8,
        )
    else:
        told_s, taken_s = median(found["makespans"]), median(found["seconds"][OURS])
        yield Row(
            f"{cell.name}: the longest sum of a rank, against the step",
            "reported",
            {"off %": 100 * (told_s / taken_s - 1), "step_ms": 1e3 * taken_s, **figures},
        )


def clock_row(cell: Cell, num_steps: int) -> Row:
    """Compare own time with the truth."""
    found = run_workers(cell.world_size, clock, cell, num_steps, timeout_s=300)
    measured = np.array(found[0][0])
    truth = np.array([each[1] for each in found]).T[: len(measured)]
    off = 100 * (np.median(measured, axis=0) / np.median(truth, axis=0) - 1)
    return Row(
        f"own time against the truth: {cell.name}",
        "within 5 % on each rank",
        {"off %": np.round(off, 2).tolist(), "ms": np.round(1e3 * np.median(truth, axis=0), 1)},
        bool((np.abs(off) <= 5).all()),
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each answer as it is ready."""
    for cell in (RACE, EQUAL, ODD):
        if options.only in cell.name:
            progress(cell.name)
            yield from race_rows(cell, 6 if options.quick else options.rounds)
    for cell in CLOCKS:
        if options.only in cell.name:
            progress(cell.name)
            yield clock_row(cell, 6 if options.quick else options.rounds)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how long, and which cases."""
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--rounds", type=int, default=60, help="counted steps of each contestant")


if __name__ == "__main__":
    main(__doc__ or "", rows, add_options)
