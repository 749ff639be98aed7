"""Training on samples of unlike lengths: `Balancer(cost=...)` beside plain DDP and other methods.

Four ranks train a small model on functions of the standard library. The time of their devices is
emulated: forward and backward together last as long as the true cost of the batch says, which is
at least five times what they compute. Methods take turns in blocks of steps, in the same processes,
and train on the same samples in the same steps; each step is compared with the bound of its own
samples. `slowest_device_over_bound` is the part that follows from who has what; the rest, `host_s`,
is what Python and gloo take. `speed_only` is `Balancer()`, which counts samples. Methods that
learn nothing have shorter blocks, of the last steps.

How long a unit of cost takes follows from a rule, not from ratios of such steps. Balanced steps
take at least five times the CPU time of all four ranks together, as these share two cores where
real ones have cores of their own. That CPU time was 32 ms a step, and 42 ms where samples are
padded. So steps are made to take 180 to 240 ms. `device_over_cpu_of_all` is what was reached.

Packing instead: samples are put together beforehand, best-fit, to as many tokens as the longest
sample has. `packs, plain` is plain DDP on packs, `packs, ours` balances packs by the sums of
their samples' lengths and squares, and `ours, unpacked` balances samples without packs. All train
on the same samples, but for a few, in steps of as many tokens on average. But which samples share a
step differs: packs are other batches.
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

from benchmarks._common import Row, bootstrap_median, main, progress
from benchmarks._lengths_methods import BATCH, NUM_RANKS, SAMPLERS, Block, Trained, train
from benchmarks._lengths_packs import PACKING, pack_orders, packing
from benchmarks._lengths_training import SPEEDS, Cell, text
from evenstep.testing import run_workers

METHODS = ("plain", "speed_only", "rebalance_sampler", "ours")
BAR = "ours <= 1.08 of the bound; at equal speeds plain >= 1.25 of ours where it is >= 1.35 of it"
FIRST = 20  # steps in which costs are learnt
SETTLE = 3  # first steps of methods that learn nothing
Figures = dict[str, Any]


def blocks_of(options: argparse.Namespace) -> list[Block]:
    """Return the blocks of all rounds: in each the same samples for all, and another order."""
    blocks, num_samples = [], len(text())
    num_steps = options.warm_up + options.steps
    for number in range(options.rounds):
        rng = np.random.default_rng(number)
        order = rng.permutation(num_samples)[: num_steps * BATCH].reshape(num_steps, BATCH)
        blocks += [
            Block(method, order[left_out(method, options) :]) for method in turn(METHODS, number)
        ]
    return blocks


def blocks_of_packs(options: argparse.Namespace) -> list[Block]:
    """Return the blocks of all rounds: the same samples, in packs or without."""
    blocks, data = [], text()
    for number in range(options.rounds):
        rng = np.random.default_rng(number)
        of_packs, of_samples = pack_orders(data, rng, warm_up=options.warm_up, steps=options.steps)
        for method in turn(PACKING, number):
            order = of_packs if Block(method, of_packs).has_packs else of_samples
            blocks.append(Block(method, order[left_out(method, options) :]))
    return blocks


def turn(methods: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the order of a round, in which another method is the first."""
    first = number % len(methods)
    return (*methods[first:], *methods[:first])


def left_out(method: str, options: argparse.Namespace) -> int:
    """Return how many of the first steps a method does without, as it learns nothing in them."""
    return max(0, options.warm_up - SETTLE) if method in SAMPLERS else 0


def steps_s(ranks: Sequence[Trained]) -> np.ndarray:
    """Return the seconds of each step, which is over when its last rank is."""
    return np.diff(np.max([one.ends_s for one in ranks], axis=0))


def measure(cell: Cell, blocks: Sequence[Block], options: argparse.Namespace) -> Figures:
    """Train blocks; return seconds and bounds of all steps, and whether the emulation held."""
    load = os.getloadavg()[0]
    timeout_s = 60 + 2.0 * sum(len(block.order) for block in blocks)
    ranks = run_workers(NUM_RANKS, train, cell, blocks, options.checks, timeout_s=timeout_s)
    runs = [[rank[1 + number] for rank in ranks] for number in range(len(blocks))]
    found: Figures = {
        "contention": [rank[0] for rank in ranks],
        "sleep_over_cpu": min(sum(one.device_s) / one.cpu_s for run in runs for one in run),
        "sleep_over_process_cpu": min(
            sum(one.device_s) / one.process_s for run in runs for one in run
        ),
        "load_average": [load, os.getloadavg()[0]],
    }
    for name in dict.fromkeys(block.method for block in blocks):
        mine = [place for place, block in enumerate(blocks) if block.method == name]
        slowest = [np.max([one.device_s for one in runs[place]], axis=0) for place in mine]
        cpu_s = [sum(one.process_s for one in runs[place]) for place in mine]
        found[name] = {
            "step_s": [steps_s(runs[place]).tolist() for place in mine],
            "slowest_s": [one.tolist() for one in slowest],
            "bound_s": [bounds_s(cell, blocks[place]) for place in mine],
            "tokens": [tokens(blocks[place]) for place in mine],
            "cpu_s_of_all": [cpu / len(took) for cpu, took in zip(cpu_s, slowest, strict=True)],
            "plans": [runs[place][0].plans for place in mine],
        }
    return found


def bounds_s(cell: Cell, block: Block) -> list[float]:
    """Return what no assignment of each step's samples beats."""
    cost = block.data().cost
    return [cell.bound_s(cost[some]) for some in block.order]


def tokens(block: Block) -> list[int]:
    """Return the tokens of each step, padding left out."""
    each: list[int] = block.data().lengths[block.order].sum(axis=1).tolist()
    return each


def kept(
    name: str, cell: Cell, blocks: Sequence[Block], folder: Path, options: argparse.Namespace
) -> Figures:
    """Return what an earlier run with this folder found in a cell, or measure it."""
    shape = f"{options.rounds}x{options.warm_up}+{options.steps}"
    path = folder / (f"{name} {shape}.json".replace(", ", "-").replace(" ", "-").replace(":", ""))
    if path.exists():
        progress(f"{name}: measured before, in {path}")
        return dict(json.loads(path.read_text("utf-8")))
    found = measure(cell, blocks, options)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found), "utf-8")
    os.replace(partial, path)
    return found


def late(found: Figures, name: str, what: str, options: argparse.Namespace) -> np.ndarray:
    """Return the figures of all steps after the warm-up."""
    return np.array(found[name][what])[:, -options.steps :].ravel()


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
    measured = over_bound(found, METHODS, options)
    ours = late(found, "ours", "step_s", options)
    for name in METHODS[:-1]:
        ratio = late(found, name, "step_s", options) / ours
        measured[f"{name}_over_ours"] = float(np.median(ratio)), *bootstrap_median(ratio)
    measured["new_plans_after_warm_up"] = [
        sum(step >= options.warm_up for step in plans) for plans in found["ours"]["plans"]
    ]
    good = measured["over_bound"]["ours"] <= 1.08 and holds(found)
    good = good and measured["device_over_cpu_of_all"]["ours"] >= 5
    if cell.speeds == "equal" and measured["over_bound"]["plain"] >= 1.35:
        good = good and measured["plain_over_ours"][0] >= 1.25
    return Row(str(cell), BAR, measured | checks(found), good)


def over_bound(found: Figures, names: Sequence[str], options: argparse.Namespace) -> Figures:
    """Return the steps of some methods over their bounds, and what the host adds to a step."""
    each = {name: _over_bound(found, name, options) for name in names}
    figures = dict.fromkeys(figure for one in each.values() for figure in one)
    return {
        figure: {name: one[figure] for name, one in each.items() if figure in one}
        for figure in figures
    }


def _over_bound(found: Figures, name: str, options: argparse.Namespace) -> Figures:
    seconds, bounds, slowest = (
        late(found, name, what, options) for what in ("step_s", "bound_s", "slowest_s")
    )
    figures: Figures = {
        "over_bound": float(np.median(seconds / bounds)),
        "over_bound_limits_95": bootstrap_median(seconds / bounds),
        "over_bound_in_total": float(seconds.sum() / bounds.sum()),
        "slowest_device_over_bound": float(np.median(slowest / bounds)),
        "host_s": float(np.median(seconds - slowest)),
        "median_step_s": float(np.median(seconds)),
        "device_over_cpu_of_all": float(
            np.mean(found[name]["slowest_s"]) / np.mean(found[name]["cpu_s_of_all"])
        ),
    }
    if name not in SAMPLERS:
        first = (np.array(found[name][what])[:, :FIRST] for what in ("step_s", "bound_s"))
        figures[f"first_{FIRST}_steps_over_bound"] = float(np.divide(*(x.sum() for x in first)))
    return figures


def packed_instead(cell: Cell, found: Figures, options: argparse.Namespace) -> Row:
    """Return the row of packs beside samples without packs."""
    return Row(
        f"{cell}, packing the data set instead, in real tokens per second",
        "reported; packs put other samples into a step, so they are other batches",
        packing(found, options.steps) | checks(found),
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare methods in each cell, with packs beside."""
    cells = [Cell(speeds, padded) for padded in (False, True) for speeds in SPEEDS]
    if options.quick:
        options.rounds, options.warm_up, options.steps, options.checks = 1, 2, 4, 2
        cells = cells[:1]
    with ExitStack() as stack:
        folder = options.resume or Path(stack.enter_context(TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for cell in cells:
            blocks = blocks_of(options) + ([] if cell.padded else blocks_of_packs(options))
            found = kept(str(cell), cell, blocks, folder, options)
            yield compared(cell, found, options)
            if not cell.padded:
                yield packed_instead(cell, found, options)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how much to run, and where to keep it."""
    parser.add_argument("--rounds", type=int, default=2, help="blocks of each method in a cell")
    parser.add_argument("--warm-up", type=int, default=16, help="first steps of a block, left out")
    parser.add_argument("--steps", type=int, default=13, help="further steps of a block")
    parser.add_argument("--checks", type=int, default=6, help="batches of the contention check")
    parser.add_argument("--resume", type=Path, help="folder of cells already measured")


if __name__ == "__main__":
    main(__doc__.splitlines()[0], rows, add_options)
