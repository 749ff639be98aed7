"""What evenstep adds to a step: a plain loop and a balanced one, in turns in the same processes.

Both train the same small model on the same batches, with sizes that stay equal, so that losses have
to be the same bit by bit. The policy is `auto` in a deadband that no split leaves: it measures,
reports, forecasts and plans as always, and no plan changes a size. Under FSDP2, plain loops are not
measured, so nothing is planned there.

A step fetches, works, and does forward, backward and optimizer. The work takes 5 to 100 ms: it
sleeps, or multiplies matrices, as often in both loops. More computing ranks than cores contend.
Blocks of both loops are paired. Times are of all ranks:

- `thread_us`: CPU time of the thread that trains. `more` is that of the balanced loop over the
  plain one: the difference of medians and of 99th percentiles over all steps, and the mean
  difference of paired blocks, which has what is done in some steps only, with 95 % limits.
- `own_threads_us`: CPU time of evenstep's other threads a step, in blocks of the balanced loop and,
  as `beside`, in those of the plain loop.
- `process_us`: that of all threads, torch's included.
- `step`: the median ratio of paired blocks, and its upper 95 % bound.
- `calls`, `files`: functions of evenstep called in a step on the thread that trains, counted in
  steps of their own, and files that most steps pass through, by rank.

Further rows have peaks of memory, compiled graphs, and the same for torch's `Join`, Accelerate's
`even_batches`, and a second plain loop, which says what the ruler is worth. On a card, each rank
has one of its own, and a step's waits for it are counted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._common import Row, main, progress
from benchmarks._parity_loops import Cell, Rival, Work, Wrapper
from benchmarks._parity_measures import CLOCKS, NAMES, Effort, count_graphs, measure, remember
from evenstep.testing import run_workers

NUM_RANKS = (1, 2, 3)
WRAPPERS: Sequence[Wrapper] = ("DDP", "FSDP2")
WORKS: Sequence[Work] = ("sleeping", "computing")
EFFORTS = {
    0.005: Effort(warm=40, pairs=16, block=20, counted=200),
    0.020: Effort(warm=20, pairs=14, block=10, counted=200),
    0.030: Effort(warm=20, pairs=10, block=8, counted=200),
    0.100: Effort(warm=10, pairs=8, block=4, counted=200),
}
"""By the seconds of a step: as many steps as 25 minutes have for all cells."""
COUNTED_COMPUTING = 50  # steps that compute: the most of 200 is that of steps that sleep
SHORT_S, SHORT = (0.005, 0.030), Effort(warm=10, pairs=3, block=4, counted=20)
RIVALS: Sequence[Rival] = ("evenstep", "Join", "even_batches", "nothing")
BESIDE = [Cell("DDP", 2, step_s, rival=rival) for rival in RIVALS[1:] for step_s in (0.005, 0.030)]
COMPILED = Cell("DDP", 2, 0.005, is_compiled=True)
REMEMBERED = [Cell(wrapper, ranks, 0.005) for wrapper in WRAPPERS for ranks in NUM_RANKS]
EQUAL = "losses are the same bit by bit"
LIMIT_S = 7200.0
"""Seconds after which processes count as stuck."""


def grid() -> list[Cell]:
    """Return every pair of a plain and a balanced loop."""
    return [
        Cell(wrapper, num_ranks, step_s, work, num_workers)
        for num_ranks, wrapper, step_s, work, num_workers in product(
            NUM_RANKS, WRAPPERS, EFFORTS, WORKS, (0, 2)
        )
    ]


def effort_of(cell: Cell, *, quick: bool) -> Effort:
    """Return how many steps a cell has."""
    if quick:
        return SHORT
    effort = EFFORTS[cell.step_s]
    if cell.work == "computing":
        return replace(effort, counted=COUNTED_COMPUTING)
    return effort


def at_ranks(num_ranks: int, function: Any, *arguments: Any) -> list[Any]:
    """Return what each rank finds: ``function(rank, store, *arguments)``."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        return run_workers(num_ranks, function, store, *arguments, timeout_s=LIMIT_S)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the grid, then what stands beside it; the processes are the same per world size."""
    quick = options.quick
    cells = [cell for cell in [*grid(), *BESIDE] if fits(cell)]
    remembered = [cell for cell in REMEMBERED if fits(cell)]
    if quick:
        cells = [cell for cell in cells if cell.num_ranks == 2 and cell.step_s in SHORT_S]
        remembered = [cell for cell in remembered if cell.num_ranks == 2]
    for num_ranks, rival in product(NUM_RANKS, RIVALS):
        here = [cell for cell in cells if (cell.num_ranks, cell.rival) == (num_ranks, rival)]
        todo = [(one, effort_of(one, quick=quick)) for one in here if options.only in one.name]
        if todo:
            ranks = at_ranks(num_ranks, measure, todo)
            for (cell, effort), found in zip(todo, zip(*ranks, strict=True), strict=True):
                yield row_of(cell, effort, found)
    yield from memory_rows(remembered, options.only)
    if options.only in COMPILED.name and fits(COMPILED):
        yield graphs_row(at_ranks(COMPILED.num_ranks, count_graphs, COMPILED))


def fits(cell: Cell) -> bool:
    """Tell whether each rank has a card, where there are any."""
    return not torch.cuda.is_available() or cell.num_ranks <= torch.cuda.device_count()


def row_of(cell: Cell, effort: Effort, ranks: Sequence[Any]) -> Row:
    """Return the row of a pair of loops, from what each rank found."""
    plain, other = (
        {clock: np.stack([found["times"][name][clock] for found in ranks]) for clock in CLOCKS}
        for name in NAMES
    )
    cpu_s = float(np.median(plain["thread_s"]))
    measured: dict[str, Any] = {
        "cell": asdict(cell),
        "calls": {
            "median": [float(np.median(found["calls"]["calls"])) for found in ranks],
            "max": [max(found["calls"]["calls"]) for found in ranks],
            "steps": effort.counted,
        },
        "files": {key: [found["calls"][key] for found in ranks] for key in ("most", "any")},
        "thread_us": compared(plain["thread_s"], other["thread_s"]),
        "own_threads_us": {
            **spread(other["own_threads_s"]),
            "mean": 1e6 * float(other["own_threads_s"].mean()),
            "beside": 1e6 * float(plain["own_threads_s"].mean()),
        },
        "process_us": compared(plain["process_s"], other["process_s"]),
        "step": step_of(plain["wall_s"], other["wall_s"]),
        "losses_equal": all(found["losses_equal"] for found in ranks),
        "num_losses": effort.num_compared,
        "contended": cell.work == "computing" and cell.num_ranks > (os.cpu_count() or 1),
    }
    if cell.work == "sleeping":
        measured["sleep_over_cpu"] = cell.step_s / cpu_s
    if "waits" in ranks[0]:
        measured["waits"] = [found["waits"] for found in ranks]
    return Row(cell.name, EQUAL, measured, met=measured["losses_equal"])


def spread(seconds: Any) -> dict[str, float]:
    """Return the median and the 99th percentile of all steps, in microseconds."""
    median, p99 = np.quantile(seconds, (0.5, 0.99))
    return {"median": 1e6 * float(median), "p99": 1e6 * float(p99)}


def compared(plain: Any, other: Any) -> dict[str, dict[str, Any]]:
    """Return microseconds of both loops and what the other one takes more.

    Args:
        plain: seconds, ``(num_ranks, pairs, block)``.
        other: likewise.
    """
    both = {"plain": spread(plain), "other": spread(other)}
    more_us = 1e6 * (other - plain).mean(axis=(0, 2))
    more = {key: both["other"][key] - both["plain"][key] for key in both["plain"]}
    limits = np.quantile(resampled(more_us, np.mean), (0.025, 0.975)).tolist()
    return {**both, "more": {**more, "mean": float(more_us.mean()), "limits_95": limits}}


def step_of(plain: Any, other: Any) -> dict[str, Any]:
    """Return milliseconds of a step, and the ratio of paired blocks with its upper bound."""
    ratios = other.mean(axis=(0, 2)) / plain.mean(axis=(0, 2))
    return {
        "plain_ms": 1e3 * float(np.median(plain)),
        "other_ms": 1e3 * float(np.median(other)),
        "ratio": float(np.median(ratios)),
        "at_most": float(np.quantile(resampled(ratios, np.median), 0.95)),
        "pairs": len(ratios),
        "steps": plain[0].size,
    }


def resampled(values: Any, statistic: Any) -> Any:
    """Return a statistic of 2000 resamples."""
    draws = np.random.default_rng(0).choice(values, (2000, len(values)))
    return statistic(draws, axis=1)


def memory_rows(cells: Sequence[Cell], only: str) -> Iterator[Row]:
    """Measure the bytes of each loop, alone: the largest of all ranks."""
    for num_ranks in NUM_RANKS:
        here = [cell for cell in cells if cell.num_ranks == num_ranks]
        here = [cell for cell in here if only in f"memory of {cell.name}"]
        if here:
            progress(f"memory at {num_ranks} ranks")
            ranks = at_ranks(num_ranks, remember, here)
            for cell, found in zip(here, zip(*ranks, strict=True), strict=True):
                most = {
                    name: {kind: max(one[name][kind] for one in found) for kind in found[0][name]}
                    for name in found[0]
                }
                yield Row(
                    f"memory of {cell.name}", "reported", {"cell": asdict(cell), "bytes": most}
                )


def graphs_row(ranks: Sequence[Any]) -> Row:
    """Return the row of what torch compiles: the most of all ranks."""
    counts = {
        name: {kind: max(found[name][kind] for found in ranks) for kind in ("graphs", "breaks")}
        for name in NAMES
    }
    equal = all(found["plain"]["losses"] == found["other"]["losses"] for found in ranks)
    return Row(
        COMPILED.name,
        f"{EQUAL}; as many graphs, as many breaks",
        {"cell": asdict(COMPILED), **counts, "losses_equal": equal},
        met=equal and counts["plain"] == counts["other"],
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add which cells to measure."""
    parser.add_argument("--only", default="", metavar="TEXT", help="cells with this in their name")


if __name__ == "__main__":
    main((__doc__ or "").splitlines()[0], rows, add_options)
