"""Steps of a few milliseconds on a machine with no core to spare: times are mostly noise.

There is nothing to balance, so `auto` should stay at equal sizes, decide seldom, and cost little
more than plain DDP. Both train in the same processes, a block of steps each in turns, so that
what else the machine does meets both alike. `Balancer(policy="equal")` stands beside `auto`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks._common import Row, main, progress
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

BATCH_SIZE, BLOCK = 32, 50
NUM_WORKERS = 2, 3
STEP_S = 0.005  # of plain DDP
NAMES = ("equal", "auto")
Blocks = list[tuple[float, float]]


def train(
    rank: int, name: str, num_blocks: int, width: int, world_size: int
) -> tuple[Blocks, list[int]]:
    """Return seconds of a step, of plain DDP's and ours, in each pair of blocks; and our sizes."""
    torch.set_num_threads(1)
    num_samples = num_blocks * BLOCK * BATCH_SIZE * world_size
    data = TensorDataset(torch.randn(num_samples, 64), torch.randint(0, 10, (num_samples,)))
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    plain = stepper(DistributedDataParallel(model_of(width)), loader)
    with Balancer(policy=name, runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model_of(width), DataLoader(data, batch_size=BATCH_SIZE))
        ours, sizes = stepper(model, loader), []
        blocks = []
        for _ in range(num_blocks):
            plain_s, _ = block(plain)
            ours_s, more = block(ours)
            blocks.append((plain_s, ours_s))
            sizes += more
        return blocks, sizes


def width_of_steps(rank: int) -> int:
    """Return the hidden units with which a step of plain DDP takes about ``STEP_S`` here.

    Found by trying: widths that are measured one after the other, on a busy machine too, lie on no
    straight line.
    """
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(1 << 14, 64), torch.randint(0, 10, (1 << 14,)))
    width = 2048
    for _ in range(6):
        loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
        step, took_s = stepper(DistributedDataParallel(model_of(width)), loader), []
        for _ in range(150):
            began_s = perf_counter()
            step()
            took_s.append(perf_counter() - began_s)
        longest_s = torch.tensor(median(took_s[20:]))
        dist.all_reduce(longest_s, op=dist.ReduceOp.MAX)
        width = int(width * min(max(STEP_S / float(longest_s), 0.5), 2.0))
        width = min(max(width, 256), 1 << 15)
    return width


def model_of(width: int) -> Any:
    """Return a model of one hidden layer."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )


def stepper(model: Any, loader: Any) -> Callable[[], int]:
    """Return what trains one step, and returns this rank's batch size in it."""
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.01), iter(loader)

    def step() -> int:
        x, y = next(batches)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return len(x)

    return step


def block(step: Callable[[], int]) -> tuple[float, list[int]]:
    """Train a block of steps; return the mean seconds of one and the sizes."""
    sizes = [step()]  # the first step after the other's block is left out
    began_s = perf_counter()
    sizes += [step() for _ in range(BLOCK - 1)]
    return (perf_counter() - began_s) / (BLOCK - 1), sizes


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare blocks side by side."""
    num_runs, num_blocks = (1, 12) if options.quick else (options.runs, options.blocks)
    for world_size in NUM_WORKERS:
        progress(f"{world_size} workers: how large a model takes {1e3 * STEP_S:.0f} ms")
        width = run_workers(world_size, width_of_steps)[0]
        found: dict[str, Blocks] = {name: [] for name in NAMES}
        near_equal: list[bool] = []
        for number in range(num_runs):
            for name in NAMES:
                progress(f"{world_size} workers, run {number + 1} of {num_runs}: {name}")
                ranks = run_workers(world_size, train, name, num_blocks, width, world_size)
                found[name] += ranks[0][0][1:]  # the first pair warms up
                if name == "auto":
                    near_equal += [abs(n - BATCH_SIZE) <= 0.1 * BATCH_SIZE for n in ranks[0][1]]
        ratios = {name: sorted(ours / plain for plain, ours in found[name]) for name in NAMES}
        auto, share = ratios["auto"], sum(near_equal) / len(near_equal)
        yield Row(
            f"{world_size} equal workers, steps of "
            f"{1e3 * median(plain for plain, _ in found['auto']):.1f} ms",
            "sizes within 10 % of equal in 95 % of the steps; auto takes at most 1.10 times plain",
            {
                "near_equal_sizes": share,
                "auto_over_plain": median(auto),
                "middle_half": (auto[len(auto) // 4], auto[3 * len(auto) // 4]),
                "equal_over_plain": median(ratios["equal"]),
                "num_pairs": len(auto),
                "hidden_units": width,
            },
            met=share >= 0.95 and median(auto) <= 1.10,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how much to run."""
    parser.add_argument("--runs", type=int, default=5, help="runs of each policy")
    parser.add_argument("--blocks", type=int, default=30, help="pairs of blocks in a run")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
