"""The rows on links that change: who follows them, who does not, and who knows them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from benchmarks._common import Row, progress
from benchmarks._network_lab import in_lab
from evenstep.lab import Trace, drawn_trace

NUM_WORKERS = 4
NUM_SERVERS = {"collocated": 0, "dedicated": 2}
NUM_ELEMENTS = 500_000  # 2 MB in 8 chunks: each several times a burst, and still many exchanges
NUM_CHUNKS = 8
START = 3  # exchanges in which a follower looks at all-reduce and at the links, once in a training
PAPER = 2.68


def changing(options: argparse.Namespace) -> Iterator[Row]:
    """Let all contestants see the same links, redrawn from 20 to 155 Mbit/s again and again."""
    seeds = range(1 if options.quick else options.seeds)
    redraws = 1 if options.quick else options.redraws
    for kind, num_servers in NUM_SERVERS.items():
        runs = []
        for seed in seeds:
            seconds = redraws * options.every_s
            progress(f"links that change, {kind}, seed {seed}: {seconds:.0f} s")
            runs.append(_run(NUM_WORKERS + num_servers, seed, options.every_s, seconds))
        yield _row(kind, runs, options.every_s)


def _run(num_hosts: int, seed: int, every_s: float, seconds: float) -> list[dict[str, Any]]:
    """Return all rounds: what every contestant's exchange was."""
    trace = drawn_trace(num_hosts, seconds + 60.0, seed=seed, every_s=every_s)
    settings = {
        "job": "follow",
        "num_workers": NUM_WORKERS,
        "num_elements": NUM_ELEMENTS,
        "num_chunks": NUM_CHUNKS,
        "trace": table(trace, num_hosts),
        "seconds": seconds,
    }
    told = in_lab([100.0] * num_hosts, settings, trace=trace)
    rounds: list[dict[str, Any]] = told["rounds"]
    return rounds


def table(trace: Trace, num_hosts: int) -> list[tuple[float, list[float]]]:
    """Return when rates begin to hold, and all hosts' rates in Mbit/s from then on."""
    answer: list[tuple[float, list[float]]] = []
    for change in trace.changes:
        if not answer or answer[-1][0] != change.at_s:
            answer.append((change.at_s, [0.0] * num_hosts))
        if change.mbit is not None:
            answer[-1][1][change.host] = change.mbit.up_mbit
    return answer


def part_of_gain(seconds: dict[str, float], name: str) -> float:
    """Return how much of what knowing the links saves over equal shares ``name`` saves."""
    return (seconds["equal"] - seconds[name]) / (seconds["equal"] - seconds["knowing"])


def totals(run: list[dict[str, Any]], *, first: int) -> dict[str, float]:
    """Return the seconds of every contestant, summed over the rounds from ``first`` on."""
    return {name: sum(taken[name]["seconds"] for taken in run[first:]) for name in run[0]}


def _row(kind: str, runs: list[list[dict[str, Any]]], every_s: float) -> Row:
    names = list(runs[0][0])
    each = [totals(run, first=START) for run in runs]
    total = {name: sum(seconds[name] for seconds in each) for name in names}
    all_of_it = [totals(run, first=0) for run in runs]
    with_start = {name: sum(seconds[name] for seconds in all_of_it) for name in names}
    runs = [run[START:] for run in runs]
    number = sum(map(len, runs))
    done = [one for run in runs for taken in run for one in taken.values()]
    exact = all(one["exact"] for one in done if one["parts"] is not None)
    apart = max(one["apart"] for one in done)
    part = part_of_gain(total, "optimal")
    bound_s = float(np.mean([r["knowing"]["bound_s"] for run in runs for r in run]))
    return Row(
        what=f"links redrawn every {every_s:g} s, {kind}, seeds 0 to {len(runs) - 1}, 2 MB",
        bar=">= 85 % of the knowing planner's gain over equal, as fast as proportional",
        measured={
            "part_of_gain": part,
            "part_of_gain_with_the_start": part_of_gain(with_start, "optimal"),
            "part_of_gain_by_seed": [part_of_gain(seconds, "optimal") for seconds in each],
            "faster_than_equal": {name: total["equal"] / total[name] for name in names},
            "faster_than_equal_by_bound": total["equal"] / number / bound_s,
            "paper_claims": PAPER,
            "mean_s": {name: total[name] / number for name in names},
            "median_s": {
                name: median(r[name]["seconds"] for run in runs for r in run) for name in names
            },
            "exchanges_of_each": number,
            "bitwise": exact,
            "apart": apart,
        },
        met=part >= 0.85 and total["optimal"] <= total["proportional"] and exact and apart <= 1e-6,
    )
