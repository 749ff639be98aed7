"""Who gets which samples: ours beside what trainers use, simulated steps over their bound.

A sample of length L costs `24576 L + L**2` (a transformer with `d_model` 4096), by itself (packed)
or times the samples of its forward (padded). All but `group_by_length` train on the same samples
in each step. No step is measured here: costs are taken to be known.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from benchmarks._common import Row, main, progress
from benchmarks._partitions import CONTESTANTS, equal_count
from evenstep.sim._lengths import DRAWN, draw_lengths
from evenstep.sim._lower_bound import lower_bound_s
from evenstep.solve import WorkerCosts, partition

LINEAR = 24576
SPEEDS = {"equal": (1, 1, 1, 1), "1:1:2:4": (1, 1, 2, 4)}
NUM_RANKS = (4, 16, 64)
BATCHES = (32, 128, 512, 4096)


@dataclass(frozen=True)
class Cell:
    """One kind of step."""

    num_ranks: int
    batch_size: int
    speeds: str
    lengths: str
    padded: bool

    def __str__(self) -> str:
        family = "padded" if self.padded else "packed"
        return (
            f"{family}, {self.num_ranks} ranks {self.speeds}, B = {self.batch_size}, {self.lengths}"
        )

    @property
    def speed(self) -> np.ndarray:
        """Of each rank, ``(num_ranks,)``."""
        return np.tile(SPEEDS[self.speeds], self.num_ranks // 4)

    def workers(self) -> WorkerCosts:
        """Return the true costs."""
        slow = 4 // self.speed
        return WorkerCosts(np.stack([LINEAR * slow, slow], 1), np.zeros(self.num_ranks, np.int64))


def _step(cell: Cell, length: np.ndarray, owner: np.ndarray) -> float:
    """Return the time of the slowest rank under an assignment."""
    cost = LINEAR * length + length**2
    ends = []
    for rank in range(cell.num_ranks):
        own = cost[owner == rank]
        total = own.max(initial=0) * len(own) if cell.padded else own.sum()
        ends.append(4 * total / cell.speed[rank])
    return float(max(ends))


def _bound(cell: Cell, length: np.ndarray) -> tuple[float, str]:
    """Return what no assignment beats; of padded costs, no runs of the sorted samples."""
    found = partition(np.stack([length, length**2], 1), cell.workers())
    if not cell.padded:
        return found.bound, found.limit
    cost, slow = LINEAR * length + length**2, 4.0 / cell.speed
    return lower_bound_s(cost, np.zeros(cell.num_ranks), slow, padded=True)


def _measure(cell: Cell, num_steps: int) -> dict[str, float | str]:
    """Return each contestant's step over its bound, summed over steps, and our own decision."""
    rng = np.random.default_rng(1)
    took: dict[str, float] = dict.fromkeys([*CONTESTANTS, "group_by_length"], 0.0)
    bound, limits, decision_s = 0.0, [], []
    lengths = draw_lengths(cell.lengths, num_steps * cell.batch_size, rng).reshape(num_steps, -1)
    for length in np.sort(lengths, axis=None).reshape(lengths.shape):  # other batches: unranked
        owner = equal_count(length, cell.speed, padded=cell.padded)
        took["group_by_length"] += _step(cell, length, owner)
    for length in lengths:
        this, limit = _bound(cell, length)
        bound += this
        limits.append(limit)
        for name, contestant in CONTESTANTS.items():
            begin = perf_counter()
            owner = contestant(length, cell.speed, padded=cell.padded)
            if name == "ours":
                decision_s.append(perf_counter() - begin)
            took[name] += _step(cell, length, owner)
    return {
        **{name: total / bound for name, total in took.items()},
        "limit": max(set(limits), key=limits.count),
        "decision_ms": 1e3 * float(np.median(decision_s)),
    }


def _cells(quick: bool) -> Iterator[Cell]:
    for padded in (False, True):
        for num_ranks in NUM_RANKS[:1] if quick else NUM_RANKS:
            for batch_size in BATCHES[:2] if quick else BATCHES:
                for speeds in SPEEDS:
                    for lengths in DRAWN:
                        yield Cell(num_ranks, batch_size, speeds, lengths, padded)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare all contestants in each cell; then time the largest decisions."""
    for cell in _cells(options.quick):
        progress(str(cell))
        found = _measure(cell, 3 if options.quick else max(3, 4096 // cell.batch_size // 4))
        ours = found["ours"]
        best = min(found[name] for name in CONTESTANTS)
        good = ours <= 1.05 or found["limit"] == "sample" or cell.batch_size < 4 * cell.num_ranks
        yield Row(
            str(cell),
            "ours <= 1.05 of the bound from 4 samples a rank on; first or within 1 %",
            found,
            good and ours <= 1.01 * best,
        )
    for num_samples, num_ranks, most_s in ((1024, 64, 0.010), (65536, 1024, 1.0)):
        yield _decision(num_samples, num_ranks, most_s)


def _decision(num_samples: int, num_ranks: int, most_s: float) -> Row:
    length = draw_lengths("fine-tuning", num_samples, np.random.default_rng(0)) // 2 + 1
    cell = Cell(num_ranks, num_samples, "1:1:2:4", "fine-tuning", padded=False)
    took = {}
    for padded in (False, True):
        seconds = []
        for _ in range(3):
            begin = perf_counter()
            partition(np.stack([length, length**2], 1), cell.workers(), padded=padded)
            seconds.append(perf_counter() - begin)
        took["padded_s" if padded else "packed_s"] = min(seconds)
    return Row(
        f"a decision on {num_samples} samples and {num_ranks} ranks",
        f"<= {most_s:g} s",
        took,
        max(took.values()) <= most_s,
    )


if __name__ == "__main__":
    main(__doc__.splitlines()[0], rows)
