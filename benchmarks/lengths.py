"""Training on samples of unlike lengths: `Balancer(cost=...)` beside plain DDP and other methods.

Four ranks train a small model on functions of the standard library. The time of their devices is
emulated: forward and backward together last as long as the true cost of the batch says, which is
at least five times what they compute. Methods take turns in blocks of steps, in the same processes,
and train on the same samples in the same steps; each step is compared with the bound of its own
samples. `slowest_device_over_bound` is the part that follows from who has what; the rest is what
the host takes, and depends on what else it does. `speed_only` is `Balancer()`, which counts
samples. `group_by_length` trains on other batches, and takes no part in the comparison. `seen`
learns lengths from batches: it trains two epochs, as others do beside it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks._common import Row, main, progress
from benchmarks._lengths_methods import BATCH, NUM_RANKS, Block, Trained, train
from benchmarks._lengths_packs import pack_orders, packing_row
from benchmarks._lengths_training import SPEEDS, UNIT_S, Cell, text
from benchmarks.equal_workers import bootstrap_median
from evenstep.testing import run_workers

METHODS = ("plain", "speed_only", "rebalance_sampler", "ours")
BESIDE = ("karmarkar_karp", "group_by_length")
BAR = "ours <= 1.08 of the bound; at equal speeds plain >= 1.25 of ours where it is >= 1.35 of it"
IN_TIME = ("speed_only", "ours", "seen")
IN_TIME_BAR = "first epoch <= 1.02 of speed_only; second <= 1.02 of ours, which knows lengths"
FIRST = 20  # steps in which costs are learnt
Figures = dict[str, Any]


def blocks_of(
    cell: Cell, methods: Sequence[str], options: argparse.Namespace, num_epochs: int
) -> list[Block]:
    """Return the blocks of all rounds: in each the same samples for all, and another order."""
    blocks, length = [], text(equal_lengths=cell.equal_lengths).lengths
    num_steps = options.warm_up + options.steps
    more = 4 if cell.equal_lengths else 1  # where half a percent is looked for
    for number in range(more * options.rounds):
        rng = np.random.default_rng(number)
        order = rng.permutation(len(length))[: num_steps * BATCH].reshape(num_steps, BATCH)
        by_length = order.ravel()[np.argsort(length[order.ravel()])].reshape(order.shape)
        for place in range(len(methods)):
            method = methods[(place + number) % len(methods)]
            mine = rng.permutation(by_length) if method == "group_by_length" else order
            blocks.append(Block(method, mine, num_epochs))
    return blocks


def steps_s(ranks: Sequence[Trained]) -> np.ndarray:
    """Return the seconds of each step, which is over when its last rank is."""
    return np.diff(np.max([one.ends_s for one in ranks], axis=0))


def measure(
    cell: Cell, methods: Sequence[str], options: argparse.Namespace, num_epochs: int
) -> Figures:
    """Train a cell; return seconds and bounds of all steps, and whether the emulation held."""
    blocks, load = blocks_of(cell, methods, options, num_epochs), os.getloadavg()[0]
    timeout_s = 60 + 2.0 * num_epochs * len(blocks) * (options.warm_up + options.steps)
    ranks = run_workers(NUM_RANKS, train, cell, blocks, options.checks, timeout_s=timeout_s)
    runs = [[rank[1 + number] for rank in ranks] for number in range(len(blocks))]
    length = text(equal_lengths=cell.equal_lengths).lengths
    found: Figures = {
        "contention": [rank[0] for rank in ranks],
        "sleep_over_cpu": min(sum(one.device_s) / one.cpu_s for run in runs for one in run),
        "sleep_over_process_cpu": min(
            sum(one.device_s) / one.process_s for run in runs for one in run
        ),
        "load_average": [load, os.getloadavg()[0]],
    }
    for name in methods:
        mine = [place for place, block in enumerate(blocks) if block.method == name]
        found[name] = {
            "step_s": [steps_s(runs[place]).tolist() for place in mine],
            "slowest_s": [np.max([one.device_s for one in runs[p]], axis=0).tolist() for p in mine],
            "bound_s": [
                [cell.bound_s(length[some]) for some in blocks[p].order] * num_epochs for p in mine
            ],
            "plans": [runs[place][0].plans for place in mine],
            "fetched": [max(one.fetched for one in runs[place]) for place in mine],
        }
    return found


def kept(
    cell: Cell,
    methods: Sequence[str],
    folder: Path,
    options: argparse.Namespace,
    *,
    num_epochs: int = 1,
) -> Figures:
    """Return what an earlier run with this folder found in a cell, or measure it."""
    shape = f"{options.rounds}x{options.warm_up}+{options.steps}"
    shape += "" if num_epochs == 1 else f" x{num_epochs}"
    path = folder / (f"{cell} {shape}.json".replace(", ", "-").replace(" ", "-").replace(":", ""))
    if path.exists():
        progress(f"{cell}: measured before, in {path}")
        return dict(json.loads(path.read_text("utf-8")))
    found = measure(cell, methods, options, num_epochs)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found), "utf-8")
    os.replace(partial, path)
    return found


def late(found: Figures, name: str, what: str, options: argparse.Namespace) -> np.ndarray:
    """Return the figures of all steps after the warm-up."""
    return np.array(found[name][what])[:, options.warm_up :].ravel()


def holds(found: Figures) -> bool:
    """Return whether the emulation is one: little arithmetic, and ranks alone are no faster."""
    near = abs(np.array(found["contention"]) - 1) <= 0.05
    return bool(found["sleep_over_cpu"] >= 5 and near.all())


def checks(found: Figures) -> Figures:
    """Return what tells whether the emulation held."""
    names = ("contention", "sleep_over_cpu", "sleep_over_process_cpu", "load_average")
    return {name: found[name] for name in names} | {"emulation_holds": holds(found)}


def compared(cell: Cell, found: Figures, options: argparse.Namespace) -> Row:
    """Return the row of a cell."""
    over, total, assigned = {}, {}, {}
    for name in (name for name in (*METHODS, *BESIDE) if name in found):
        seconds, bounds = (late(found, name, what, options) for what in ("step_s", "bound_s"))
        over[name], total[name] = seconds / bounds, float(seconds.sum() / bounds.sum())
        slowest = late(found, name, "slowest_s", options)
        assigned[name] = float(np.median(slowest / bounds))
    ours = late(found, "ours", "step_s", options)
    measured: Figures = {
        "over_bound": {name: float(np.median(one)) for name, one in over.items()},
        "over_bound_limits_95": {name: bootstrap_median(one) for name, one in over.items()},
        "over_bound_in_total": total,
        "slowest_device_over_bound": assigned,
        "median_step_s": {
            name: float(np.median(late(found, name, "step_s", options))) for name in over
        },
    }
    for name in METHODS[:-1]:
        ratio = late(found, name, "step_s", options) / ours
        measured[f"{name}_over_ours"] = float(np.median(ratio)), *bootstrap_median(ratio)
    first = {name: np.array(found[name]["step_s"])[:, :FIRST].sum() for name in METHODS}
    measured[f"first_{FIRST}_steps_plain_over"] = {
        name: float(first["plain"] / took) for name, took in first.items()
    }
    measured["new_plans_after_warm_up"] = [
        sum(step >= options.warm_up for step in plans) for plans in found["ours"]["plans"]
    ]
    good = measured["over_bound"]["ours"] <= 1.08 and holds(found)
    if cell.speeds == "equal" and measured["over_bound"]["plain"] >= 1.35:
        good = good and measured["plain_over_ours"][0] >= 1.25
    return Row(str(cell), BAR, measured | checks(found), good)


def same_lengths(cell: Cell, found: Figures, options: argparse.Namespace) -> Row:
    """Return the row of a cell where lengths tell nothing, by cost beside by count."""
    ratio = late(found, "ours", "step_s", options) / late(found, "speed_only", "step_s", options)
    measured = {"by_cost_over_by_count": float(np.median(ratio))}
    limits = {"limits_95": bootstrap_median(ratio), "plans": found["ours"]["plans"]}
    return Row(
        str(cell),
        "by cost <= 1.005 of by count",
        measured | limits | checks(found),
        measured["by_cost_over_by_count"] <= 1.005 and holds(found),
    )


def seen_in_time(cell: Cell, found: Figures, options: argparse.Namespace) -> Row:
    """Return the row of a cell whose lengths become known in the first of two epochs."""
    took = {name: np.array(found[name]["step_s"]) for name in IN_TIME}
    bounds = np.array(found["seen"]["bound_s"])
    half = bounds.shape[1] // 2
    epochs = {"first": np.s_[:, :half], "second": np.s_[:, half:]}
    measured: Figures = {
        f"{name}_epoch_over_bound": {
            method: float(seconds[epoch].sum() / bounds[epoch].sum())
            for method, seconds in took.items()
        }
        for name, epoch in epochs.items()
    }
    measured["slowest_device_over_bound"] = {
        f"{name}, {method}": float((np.array(found[method]["slowest_s"]) / bounds)[epoch].mean())
        for name, epoch in epochs.items()
        for method in IN_TIME
    }
    first, second = (measured[f"{name}_epoch_over_bound"] for name in epochs)
    measured["first_epoch_over_speed_only"] = first["seen"] / first["speed_only"]
    measured["second_epoch_over_ours"] = second["seen"] / second["ours"]
    measured["steps_of_new_plans"] = found["seen"]["plans"]
    good = measured["first_epoch_over_speed_only"] <= 1.02
    good = good and measured["second_epoch_over_ours"] <= 1.02 and holds(found)
    return Row(f"{cell}, lengths seen", IN_TIME_BAR, measured | checks(found), good)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare methods in each cell; then where there is nothing to win."""
    cells = [Cell(speeds, padded) for padded in (False, True) for speeds in SPEEDS]
    methods: tuple[str, ...] = (*METHODS, *BESIDE)
    if options.quick:
        options.rounds, options.warm_up, options.steps, options.checks = 1, 4, 6, 4
        cells, methods = [cells[0], cells[-1]], METHODS
    with ExitStack() as stack:
        folder = options.resume or Path(stack.enter_context(TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for cell in cells:
            yield compared(cell, kept(cell, methods, folder, options), options)
        cell = Cell("equal", padded=False, equal_lengths=True)
        found = kept(cell, ("speed_only", "ours"), folder, options)
        yield same_lengths(cell, found, options)
        for cell in (Cell("1:1:2:4", padded=False), Cell("equal", padded=True)):
            found = kept(cell, IN_TIME, folder, options, num_epochs=2)
            yield seen_in_time(cell, found, options)
            if options.quick:
                break


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how much to run, and where to keep it."""
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each method in a cell")
    parser.add_argument("--warm-up", type=int, default=25, help="first steps of a block, left out")
    parser.add_argument("--steps", type=int, default=40, help="further steps of a block")
    parser.add_argument("--checks", type=int, default=12, help="batches of the contention check")
    parser.add_argument("--resume", type=Path, help="folder of cells already measured")


if __name__ == "__main__":
    main(__doc__.splitlines()[0], rows, add_options)
