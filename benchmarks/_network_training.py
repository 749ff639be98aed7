"""The rows on whole training steps over links that change."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks._common import Row, progress
from benchmarks._network_changing import table
from benchmarks._network_lab import in_lab
from evenstep.lab import Trace, drawn_trace
from evenstep.lab._trace import Change

SAMPLES = 64
EVERY_S = 20.0
LEAD_S, REST_S = 8.0, 2.0  # of a slot: to open on the first rates, and to close
FIRST_S = 20.0  # until all ranks have begun
NUM_SLOTS = 8  # twice as many as contestants: whoever comes late takes the next
SMALL_ELEMENTS = 500_000  # 2 MB, so that many steps see the same links


def training(options: argparse.Namespace) -> Iterator[Row]:
    """Let every contestant train over the same links, redrawn again and again."""
    seeds, draws = 1 if options.quick else 2, 1
    every_s = 12.0 if options.quick else EVERY_S
    contestants = [
        {"name": "all-reduce", "policy": "auto", "network": None},
        *(
            {"name": name, "policy": "auto", "network": {"shares": name}}
            for name in ("equal", "proportional", "optimal")
        ),
    ]
    slot_s = LEAD_S + draws * every_s + REST_S
    settings = {
        "job": "slots",
        "slope_s": [0.002] * 4,
        "intercept_s": 0.02,
        "num_elements": SMALL_ELEMENTS,
        "global_batch_size": SAMPLES,
        "slot_s": slot_s,
        "lead_s": LEAD_S,
        "rest_s": REST_S,
        "first_s": FIRST_S,
        "num_slots": NUM_SLOTS,
    }
    runs = []
    for seed in range(seeds):
        progress(f"training on links that change, seed {seed}: {FIRST_S + 4 * slot_s:.0f} s")
        turned = contestants[seed:] + contestants[:seed]
        trace = repeated(seed, slot_s, every_s, draws)
        told = in_lab([100.0] * 4, {**settings, "contestants": turned}, trace=trace)
        runs.append(told)
    yield _training_row(runs, every_s, draws)


def repeated(seed: int, slot_s: float, every_s: float, draws: int) -> Trace:
    """Return the same drawn rates in every slot, and others while it opens."""
    drawn = table(drawn_trace(4, (draws + 1) * every_s, seed=seed, every_s=every_s), 4)
    changes = [Change(0.0, host, mbit=rate) for host, rate in enumerate(drawn[0][1])]
    for slot in range(NUM_SLOTS):
        for number, (_, rates) in enumerate(drawn):
            at_s = FIRST_S + slot * slot_s + (LEAD_S + (number - 1) * every_s if number else 0.0)
            changes += [Change(at_s, host, mbit=rate) for host, rate in enumerate(rates)]
    return Trace(changes)


def _training_row(runs: list[dict[str, Any]], every_s: float, draws: int) -> Row:
    names = sorted(runs[0]["counted"])
    each_s = {name: [_mean_s(run["counted"][name]) for run in runs] for name in names}
    step_s = {name: float(np.mean(seconds)) for name, seconds in each_s.items()}
    ends = [end for run in runs for end in run["ends"].values()]
    sound = all(end["alike"] and end["finite"] for end in ends)
    return Row(
        what=f"training on links redrawn every {every_s:g} s, {draws} draws of "
        f"{len(runs)} seeds, {4e-6 * SMALL_ELEMENTS:g} MB, {SAMPLES} samples in 0.05 s",
        bar="reported; parameters finite and equal between ranks",
        measured={
            "faster_than_all_reduce": {name: step_s["all-reduce"] / step_s[name] for name in names},
            "by_seed": {
                name: [one / other for one, other in zip(each_s["all-reduce"], own, strict=True)]
                for name, own in each_s.items()
            },
            "mean_step_s": step_s,
            "samples_per_s": {name: SAMPLES / step_s[name] for name in names},
            "steps": {name: [len(run["counted"][name]) - 1 for run in runs] for name in names},
            "plans_of_shares": {
                name: [len(run["ends"][name]["plans"]) for run in runs] for name in names
            },
            "parameters_sound": sound,
        },
        met=sound,
    )


def _mean_s(counted: list[float]) -> float:
    """Return the mean of the steps between the first and the last that were counted."""
    return (counted[-1] - counted[0]) / (len(counted) - 1)
