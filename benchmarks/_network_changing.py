"""The rows on links that change: who follows them, who does not, and who knows them."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks._common import Row, progress
from benchmarks._network_follow import NAMES
from benchmarks._network_lab import in_lab
from evenstep.lab import Trace, drawn_trace

NUM_WORKERS = 4
NUM_SERVERS = {"collocated": 0, "dedicated": 3}
NUM_ELEMENTS = 500_000  # 2 MB in 8 chunks: each several times a burst, and still many exchanges
NUM_CHUNKS = 8
LEAD_S = 10.0  # for processes to begin
START = 3  # exchanges of a follower, twice all-reduce and equal shares once, before it can follow
PAPER = 2.68

Taken = dict[str, Any]


def changing(options: argparse.Namespace) -> Iterator[Row]:
    """Let all contestants have the same links, redrawn from 20 to 155 Mbit/s again and again."""
    seeds = range(1 if options.quick else options.seeds)
    redraws = 2 if options.quick else options.redraws
    for kind, num_servers in NUM_SERVERS.items():
        if options.kind not in (None, kind):
            continue
        runs = []
        for seed in seeds:
            seconds = redraws * len(NAMES) * options.every_s
            progress(f"links that change, {kind}, seed {seed}: {seconds:.0f} s")
            runs.append(_run(NUM_WORKERS + num_servers, seed, options.every_s, redraws))
        yield _row(kind, runs, options.every_s)


def _run(num_hosts: int, seed: int, turn_s: float, num_draws: int) -> list[Taken]:
    """Return all exchanges."""
    draw_s = turn_s * len(NAMES)
    drawn = drawn_trace(num_hosts, draw_s * num_draws, seed=seed, every_s=draw_s)
    changes = [replace(one, at_s=one.at_s + LEAD_S * (one.at_s > 0)) for one in drawn.changes]
    trace = Trace(tuple(changes))
    settings = {
        "job": "follow",
        "num_workers": NUM_WORKERS,
        "num_elements": NUM_ELEMENTS,
        "num_chunks": NUM_CHUNKS,
        "trace": table(trace, num_hosts),
        "lead_s": LEAD_S,
        "turn_s": turn_s,
        "num_draws": num_draws,
    }
    told = in_lab([100.0] * num_hosts, settings, trace=trace)
    exchanges: list[Taken] = told["exchanges"]
    return exchanges


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


def means(run: Sequence[Taken], *, first: int, field: str = "seconds") -> dict[str, float]:
    """Return everybody's mean over the draws of an exchange's mean, from ``first`` on."""
    answer = {}
    for name in NAMES:
        of_draw = defaultdict(list)
        for taken in [taken for taken in run if taken["name"] == name][first:]:
            of_draw[taken["draw"]].append(taken[field])
        answer[name] = fmean(map(fmean, of_draw.values()))
    return answer


def _row(kind: str, runs: list[list[Taken]], every_s: float) -> Row:
    each = [means(run, first=START) for run in runs]
    mean_s = {name: fmean(seconds[name] for seconds in each) for name in NAMES}
    all_of_it = [means(run, first=0) for run in runs]
    with_start = {name: fmean(seconds[name] for seconds in all_of_it) for name in NAMES}
    bounds_s = [means(run, first=START, field="bound_s")["knowing"] for run in runs]
    done = [taken for run in runs for taken in run]
    exact = all(one["exact"] for one in done if one["parts"] is not None)
    apart = max(one["apart"] for one in done)
    part = part_of_gain(mean_s, "optimal")
    return Row(
        what=f"links redrawn every {every_s:g} s, {kind}, seeds 0 to {len(runs) - 1}, 2 MB",
        bar=">= 85 % of the knowing planner's gain over equal, as fast as proportional",
        measured={
            "part_of_gain": part,
            "part_of_gain_with_the_start": part_of_gain(with_start, "optimal"),
            "part_of_gain_by_seed": [part_of_gain(seconds, "optimal") for seconds in each],
            "faster_than_equal": {name: mean_s["equal"] / mean_s[name] for name in NAMES},
            "faster_than_equal_by_bound": mean_s["equal"] / fmean(bounds_s),
            "paper_claims": PAPER,
            "mean_s": mean_s,
            "exchanges": {name: sum(one["name"] == name for one in done) for name in NAMES},
            "draws_of_each": len({(i, one["draw"]) for i, run in enumerate(runs) for one in run}),
            "bitwise": exact,
            "apart": apart,
        },
        met=part >= 0.85
        and mean_s["optimal"] <= mean_s["proportional"]
        and exact
        and apart <= 1e-6,
    )
