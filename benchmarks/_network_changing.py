"""The rows on links that change: who follows them, who does not, and who knows them."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks._common import Row, progress
from benchmarks._network_lab import in_lab
from evenstep.lab import Change, drawn_trace

NUM_WORKERS = 4
NUM_SERVERS = {"collocated": 0, "dedicated": 3}
LEAD_S = 10.0  # for processes to begin
START = 3  # exchanges of a follower, twice all-reduce and equal shares once, before it can follow
PAPER = 2.68

Taken = dict[str, Any]


@dataclass(frozen=True)
class Race:
    """What is exchanged while links change, and among whom.

    Attributes:
        names: of the contestants.
        num_elements: of the gradients, in float32.
        num_chunks: each is several times a burst of the shaped links.
        compute_s: of a real classifier's gradient; None exchanges the same gradients always.
    """

    names: tuple[str, ...]
    num_elements: int
    num_chunks: int
    compute_s: float | None = None


EXCHANGES = Race(("knowing", "optimal", "proportional", "equal", "static"), 500_000, 8)


def raced(race: Race, options: argparse.Namespace) -> Iterator[Row]:
    """Let all contestants have the same links, redrawn from 20 to 155 Mbit/s again and again."""
    seeds = range(1 if options.quick else options.seeds)
    redraws = 2 if options.quick else options.redraws
    for kind, num_servers in NUM_SERVERS.items():
        if options.kind not in (None, kind):
            continue
        runs, alike = [], []
        for seed in seeds:
            seconds = redraws * len(race.names) * options.every_s
            progress(f"links that change, {kind}, seed {seed}: {seconds:.0f} s")
            told = _run(race, NUM_WORKERS + num_servers, seed, options.every_s, redraws)
            runs.append(told["exchanges"])
            alike += told["alike"].values()
        yield _row(race, kind, runs, options.every_s, are_alike=all(alike))


def _run(race: Race, num_hosts: int, seed: int, turn_s: float, num_draws: int) -> dict[str, Any]:
    """Return all exchanges, and whose workers have the same parameters at the end."""
    draw_s = turn_s * len(race.names)
    drawn = drawn_trace(num_hosts, draw_s * num_draws, seed=seed, every_s=draw_s)
    trace = [replace(one, at_s=one.at_s + LEAD_S * (one.at_s > 0)) for one in drawn]
    settings = {
        "job": "follow",
        "num_workers": NUM_WORKERS,
        "num_elements": race.num_elements,
        "num_chunks": race.num_chunks,
        "compute_s": race.compute_s,
        "names": race.names,
        "trace": table(trace, num_hosts),
        "lead_s": LEAD_S,
        "turn_s": turn_s,
        "num_draws": num_draws,
    }
    return in_lab([100.0] * num_hosts, settings, trace=trace)


def table(trace: Sequence[Change], num_hosts: int) -> list[tuple[float, list[float]]]:
    """Return when rates begin to hold, and all hosts' rates in Mbit/s from then on."""
    answer: list[tuple[float, list[float]]] = []
    for change in trace:
        if not answer or answer[-1][0] != change.at_s:
            answer.append((change.at_s, [0.0] * num_hosts))
        if change.mbit is not None:
            answer[-1][1][change.host] = change.mbit.up_mbit
    return answer


def part_of_gain(seconds: dict[str, float], name: str) -> float:
    """Return how much of what knowing the links saves over equal shares ``name`` saves."""
    return (seconds["equal"] - seconds[name]) / (seconds["equal"] - seconds["knowing"])


def means(run: Sequence[Taken], *, first: int, field: str) -> dict[str, float]:
    """Return everybody's mean over the draws of an exchange's mean, from ``first`` on."""
    by_name = defaultdict(list)
    for taken in run:
        by_name[taken["name"]].append(taken)
    answer = {}
    for name, each in by_name.items():
        of_draw = defaultdict(list)
        for taken in each[first:]:
            of_draw[taken["draw"]].append(taken[field])
        answer[name] = fmean(map(fmean, of_draw.values()))
    return answer


def _row(race: Race, kind: str, runs: list[list[Taken]], every_s: float, *, are_alike: bool) -> Row:
    trains = race.compute_s is not None
    field, names = "step_s" if trains else "seconds", race.names
    each = [means(run, first=START, field=field) for run in runs]
    mean_s = {name: fmean(seconds[name] for seconds in each) for name in names}
    all_of_it = [means(run, first=0, field=field) for run in runs]
    with_start = {name: fmean(seconds[name] for seconds in all_of_it) for name in names}
    bound_s = fmean(means(run, first=START, field="bound_s")["knowing"] for run in runs)
    done = [taken for run in runs for taken in run]
    exact = all(one["exact"] for one in done if one["parts"] is not None)
    apart = max(one["apart"] for one in done)
    part = part_of_gain(mean_s, "optimal")
    what = f"links redrawn every {every_s:g} s, {kind}, {len(runs)} seeds"
    size = f"{4e-6 * race.num_elements:g} MB"
    return Row(
        what=f"training on {what}, {size}, {race.compute_s} s" if trains else f"{what}, {size}",
        bar=">= 85 % of the knowing planner's gain over equal, as fast as proportional",
        measured={
            "part_of_gain": part,
            "part_of_gain_with_the_start": part_of_gain(with_start, "optimal"),
            "part_of_gain_by_seed": [part_of_gain(seconds, "optimal") for seconds in each],
            "faster_than_equal": {name: mean_s["equal"] / mean_s[name] for name in names},
            "faster_than_equal_by_bound": mean_s["equal"] / (bound_s + (race.compute_s or 0.0)),
            "faster_than_last": {name: mean_s[names[-1]] / mean_s[name] for name in names},
            "paper_claims": PAPER,
            "mean_s": mean_s,
            "exchanges": {name: sum(one["name"] == name for one in done) for name in names},
            "draws_of_each": len({(i, one["draw"]) for i, run in enumerate(runs) for one in run}),
            "bitwise": exact,
            "apart": apart,
            "parameters_alike": are_alike,
        },
        met=part >= 0.85
        and mean_s["optimal"] <= mean_s["proportional"]
        and exact
        and apart <= 1e-6
        and are_alike,
    )
