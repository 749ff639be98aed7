"""Whether advice comes true: step times predicted from plain training, and measured after it.

Four ranks train with DDP on devices that are emulated by sleeping, at least five times as long as
they compute. What plain DDP took in each phase says what `Balancer()` and `Balancer(cost=lengths)`
would take. Then both train on the same samples, and their steps are measured. The first 30 steps of
each are left out, in which evenstep learns. All take turns in two rounds, as the machine may be
slower for some minutes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import numpy as np

from benchmarks._common import Row, main, progress
from benchmarks._watch_advice_run import NUM_RANKS, Cell, Trained, train
from evenstep.advice._counterfactuals import Counterfactuals, foresee
from evenstep.advice._watched_steps import WatchedSteps
from evenstep.testing import run_workers

LEARNT = 30  # steps
BAR = "predicted within 5 % of measured"
CELLS = (
    Cell("equal", "equal"),
    Cell("1:1:2:4", "equal"),
    Cell("equal", "unequal"),
    Cell("1:1:2:4", "unequal"),
    Cell("1:1:2:4", "unequal", curve=0.5),
    Cell("equal", "unequal", delay_s=0.1),
)


def foreseen(plain: list[Trained]) -> Counterfactuals:
    """Return what plain training says of the steps after those in which evenstep learns."""
    return foresee(
        WatchedSteps.of(
            np.stack([one.spent_us[LEARNT - 5 :] for one in plain], axis=1),
            num_samples=np.stack([one.num_samples[LEARNT - 5 :] for one in plain], axis=1),
            size=np.stack([one.size[LEARNT - 5 :] for one in plain], axis=1),
        )
    )


def step_s(ranks: list[Trained]) -> float:
    """Return the mean of the steps after that."""
    return float(np.mean([one.spent_us[LEARNT:].sum(axis=1).mean() for one in ranks]) / 1e6)


def measured(cell: Cell, num_steps: int, num_rounds: int) -> Row:
    """Return the row of a cell."""
    methods = ("plain", "by speed", *(["by both"] if cell.lengths == "unequal" else []))
    progress(f"{cell}: {num_rounds} rounds of {num_steps} steps each of {', '.join(methods)}")
    load = os.getloadavg()[0]
    ranks = run_workers(NUM_RANKS, train, cell, methods * num_rounds, num_steps, timeout_s=900)
    runs = [[one[at] for one in ranks] for at in range(len(methods) * num_rounds)]
    of = {method: runs[at :: len(methods)] for at, method in enumerate(methods)}
    told = [foreseen(plain) for plain in of["plain"]]
    plain_s = sum(one.step_s for one in told)
    figures, errors = {"plain_s": plain_s / num_rounds}, []
    for method in methods[1:]:
        gains = [one.by_speed if method == "by speed" else one.by_both for one in told]
        took_s = sum(step_s(run) for run in of[method])
        predicted_s = sum(
            one.step_s / (gain.factor or 1) for one, gain in zip(told, gains, strict=True)
        )
        errors.append(predicted_s / took_s - 1)
        name = method.replace(" ", "_")
        figures[f"{name}_predicted"] = plain_s / predicted_s
        figures[f"{name}_measured"] = plain_s / took_s
        figures[f"{name}_error_of_step"] = errors[-1]
    sleep_over_cpu = min(one.sleep_over_cpu for run in runs for one in run)
    checks = {"sleep_over_cpu": sleep_over_cpu, "load_average": [load, os.getloadavg()[0]]}
    good = max(map(abs, errors)) <= 0.05 and sleep_over_cpu >= 5
    return Row(str(cell), BAR, figures | checks, good)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each cell."""
    for cell in CELLS[:2] if options.quick else CELLS:
        yield measured(cell, LEARNT + (20 if options.quick else 60), 1 if options.quick else 2)


if __name__ == "__main__":
    main(__doc__ or "", rows)
