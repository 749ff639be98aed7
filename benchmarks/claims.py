"""Claims inside the step: four unlike workers, bursts of load that no plan can foresee, real DDP.

Compute is emulated by sleeping, along a timeline of bursts that is drawn beforehand: every way of
training meets the same kind of load, at a third of the speed for a fifth of the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import fmean
from time import perf_counter, sleep, time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._common import Row, main, progress
from evenstep.claims import Hybrid
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

SPEEDS = np.array([6.0, 3.0, 2.0, 1.0])
SLOPE_S = 0.01 / SPEEDS
FORWARD_S = 0.002  # what every forward and backward costs before its first sample
BATCH_SIZE = 120
SLOWED = 3.0
EVERY_S, FOR_S = (0.4, 2.0), (0.1, 0.5)  # bursts come and last, between these
WARM_UP = 8
WAYS = {
    "equal split": ("equal", "off"),
    "prediction alone": ("auto", "off"),
    "stealing alone": ("equal", Hybrid()),
    "stealing alone, a fifth unasked": ("equal", Hybrid(first=0.2)),
    "hybrid": ("auto", Hybrid()),
    "auto's own choice": ("auto", "auto"),
}


class Bursts:
    """When a worker is slow, drawn by seed."""

    def __init__(self, seed: int, until_s: float) -> None:
        """Draw bursts for ``until_s`` seconds."""
        draw, now_s = np.random.default_rng(seed), 0.0
        self._edges = [0.0]  # fast, slow, fast, ...
        while now_s < until_s:
            for low, high in (EVERY_S, FOR_S):
                now_s += draw.uniform(low, high)
                self._edges.append(now_s)
        self._now = 0

    def end_s(self, begin_s: float, work_s: float) -> float:
        """Return when ``work_s`` of undisturbed work is done that begins at ``begin_s``."""
        now_s = begin_s
        while True:
            while self._edges[self._now + 1] <= now_s:
                self._now += 1
            factor = SLOWED if self._now % 2 else 1.0
            room_s = (self._edges[self._now + 1] - now_s) / factor
            if work_s <= room_s:
                return now_s + work_s * factor
            work_s -= room_s
            now_s = self._edges[self._now + 1]


class Disturbed(nn.Module):
    """A linear layer whose forward takes as long as a worker under bursts."""

    def __init__(self, slope_s: float, bursts: Bursts, began_s: float) -> None:
        """Take ``slope_s`` a sample when undisturbed; bursts count from ``began_s``."""
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)
        self._slope_s, self._bursts, self._began_s = slope_s, bursts, began_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, in due time."""
        now_s = perf_counter() - self._began_s
        end_s = self._bursts.end_s(now_s, FORWARD_S + self._slope_s * len(x))
        y: torch.Tensor = self.layer(x)
        sleep(max(0.0, self._began_s + end_s - perf_counter()))
        return y


def train(rank: int, policy: str, claims: Any, num_steps: int) -> dict[str, Any]:
    """Return the mean step after the first ones, in seconds, and how often samples were claimed."""
    data = TensorDataset(torch.zeros(num_steps * BATCH_SIZE * len(SPEEDS), 64))
    stock = DataLoader(data, batch_size=BATCH_SIZE)
    together = torch.tensor([time()], dtype=torch.float64)
    dist.broadcast(together, 0)
    began_s = perf_counter() - (time() - float(together))
    bursts = Bursts(1000 + rank, num_steps * 2.0 + 60)
    model = DistributedDataParallel(Disturbed(SLOPE_S[rank], bursts, began_s))
    seconds, forwards = [], []
    with Balancer(policy=policy, runtime=Runtime(line_every=None, claims=claims)) as balancer:
        ready, loader = balancer.prepare(model, stock)
        last_s = perf_counter()
        for step in loader.steps():
            for (x,) in step:
                ready(x).mean().backward()
            ready.zero_grad()
            now_s = perf_counter()
            seconds.append(now_s - last_s)
            forwards.append(step.num_micro_batches)
            last_s = now_s
    return {"step_s": fmean(seconds[WARM_UP:]), "forwards": fmean(forwards[WARM_UP:])}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure every way, one after the other, and the hybrid against the best of the others."""
    num_steps = 24 if options.quick else 120
    found: dict[str, dict[str, Any]] = {}
    for name, (policy, claims) in WAYS.items():
        progress(f"{num_steps} steps: {name}")
        found[name] = run_workers(len(SPEEDS), train, policy, claims, num_steps, timeout_s=600)[0]
    burst, calm = fmean(FOR_S), fmean(EVERY_S)
    work = (calm + burst / SLOWED) / (calm + burst)  # done in a second, of undisturbed work
    ideal_s = BATCH_SIZE * len(SPEEDS) / (work / SLOPE_S).sum()
    alone = [each["step_s"] for name, each in found.items() if "alone" in name]
    planned_s = found["prediction alone"]["step_s"]
    bars = {
        "hybrid": ("faster than prediction alone and stealing alone", min(alone)),
        "auto's own choice": ("faster than prediction alone, its trials included", planned_s),
    }
    for name, each in found.items():
        bar, most_s = bars.get(name, ("reported", None))
        met = None if most_s is None else each["step_s"] < most_s
        yield Row(
            f"4 sleeping workers, speeds 6 : 3 : 2 : 1, bursts inside the steps: {name}",
            bar,
            {
                "mean_step_s": each["step_s"],
                "over_ideal": each["step_s"] / ideal_s,
                "over_best_alone": each["step_s"] / min(alone),
                "forwards_a_step_on_rank_0": each["forwards"],
            },
            met,
        )


if __name__ == "__main__":
    main(__doc__ or "", rows)
