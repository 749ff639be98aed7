"""The rows on training over equal links, where `Network()` gains nothing and must cost little."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import Any

from benchmarks._common import Row, progress
from benchmarks._network_lab import in_lab

MBIT, MEGABYTES = (100.0, 200.0), (2, 8)
NUM_STEPS, QUICK_STEPS, BLOCK = 100, 20, 5
MOST = 1.02
COMPUTE = {"intercept_s": 0.02, "slope_s": [0.002] * 4, "global_batch_size": 64}  # 52 ms a step


def equal_training(options: argparse.Namespace) -> Iterator[Row]:
    """Train with `Network()` and without by turns, from the very first step on."""
    num_steps = QUICK_STEPS if options.quick else NUM_STEPS
    for mbit in MBIT:
        for megabytes in MEGABYTES:
            progress(f"4 workers at {mbit:g} Mbit/s, {megabytes} MB, twice {num_steps} steps")
            settings = {
                "job": "turns",
                "num_elements": megabytes * 250_000,
                "contestants": [
                    {"name": "plain", "policy": "equal", "network": None},
                    {"name": "network", "policy": "equal", "network": {}},
                ],
                "num_steps": num_steps,
                "block": BLOCK,
                **COMPUTE,
            }
            yield _row(in_lab([mbit] * 4, settings), mbit, megabytes, num_steps)


def _row(told: dict[str, Any], mbit: float, megabytes: int, num_steps: int) -> Row:
    plain, ours = told["seconds"]["plain"], told["seconds"]["network"]
    blocks = [
        sum(ours[at : at + BLOCK]) / sum(plain[at : at + BLOCK])
        for at in range(0, num_steps, BLOCK)
    ]
    ratio = sum(ours) / sum(plain)
    sound = all(end["alike"] and end["finite"] for end in told["ends"].values())
    return Row(
        what=f"training on equal links, {mbit:g} x 4 Mbit/s, {megabytes} MB, {num_steps} steps",
        bar=f"<= {MOST:g} times plain",
        measured={
            "plain_s": _spread(plain),
            "network_s": _spread(ours),
            "over_plain": ratio,
            "over_plain_by_block": _spread(blocks),
            "plans": told["ends"]["network"]["plans"],
            "load": os.getloadavg(),
            "parameters_sound": sound,
        },
        met=ratio <= MOST and sound,
    )


def _spread(figures: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles."""
    low, _, high = quantiles(figures, n=4)
    return median(figures), low, high
