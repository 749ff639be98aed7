"""The rows on whole training steps: links that change, and both loads planned together."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from benchmarks._common import Row, progress
from benchmarks._network_changing import table
from benchmarks._network_lab import in_lab
from evenstep import AffineTime, Cluster
from evenstep._minmax import allocate, makespan_s
from evenstep.control import JointPlan, plan_jointly
from evenstep.lab import Change, Trace, drawn_trace
from evenstep.sharding import Aggregation, Links, optimal_shares, ring_s

SPEEDS = (20.0, 30.0, 60.0, 80.0)  # samples/s: the slowest link belongs to the fastest worker
MBIT = (200.0, 150.0, 100.0, 50.0)
INTERCEPT_S = 0.02
SAMPLES = 64
NUM_ELEMENTS = 1_000_000  # 4 MB
CHUNKS = 8  # with 16, by the model, other batch sizes gain nothing here
NAMES = "equal batches", "balanced", "shares", "joint"

EVERY_S = 20.0
LEAD_S, REST_S = 8.0, 2.0  # of a slot: to open on the first rates, and to close
FIRST_S = 20.0  # until all ranks have begun
NUM_SLOTS = 8  # twice as many as contestants: whoever comes late takes the next
SMALL_ELEMENTS = 500_000  # 2 MB, so that many steps see the same links


def joint(options: argparse.Namespace) -> Iterator[Row]:
    """Compare balancing compute alone with shares beside it, and with both planned together."""
    rounds, settle = (2, 16) if options.quick else (5, 24)
    progress(f"joint planning: 4 workers at {SPEEDS} samples/s, {MBIT} Mbit/s, {rounds} rounds")
    sharing = {"chunk_bytes": 4 * NUM_ELEMENTS // CHUNKS}
    contestants = [
        {"name": "equal batches", "policy": "equal", "network": None, "settle": 2},
        {"name": "balanced", "policy": "auto", "network": None, "settle": 6},
        _sharing("shares", {**sharing, "joint": False}, settle),
        _sharing("joint", {**sharing, "joint": True}, settle),
    ]
    settings = {
        "job": "blocks",
        "slope_s": [1 / speed for speed in SPEEDS],
        "intercept_s": INTERCEPT_S,
        "num_elements": NUM_ELEMENTS,
        "global_batch_size": SAMPLES,
        "contestants": contestants,
        "rounds": rounds,
        "block": 3 if options.quick else 4,
    }
    told = in_lab(MBIT, settings)
    yield _joint_row(told, predicted(told["ends"]["joint"]["probed"]))


def _sharing(name: str, network: dict[str, Any], settle: int) -> dict[str, Any]:
    return {"name": name, "policy": "auto", "network": network, "settle": settle}


def predicted(probed: list[list[float]]) -> tuple[JointPlan, float, float]:
    """Return the plan on the links as probed, balanced computing, and all-reduce by the model."""
    links = Links(*(np.array(each) for each in probed))
    aggregation = Aggregation(4, 4 * NUM_ELEMENTS, num_chunks=CHUNKS)
    times, cluster = AffineTime(np.full(4, INTERCEPT_S), 1 / np.array(SPEEDS)), Cluster(4, SAMPLES)
    shares = optimal_shares(aggregation, links)
    plan = plan_jointly(times, cluster, aggregation, links, shares=shares, margin=0.02)
    return plan, makespan_s(times, allocate(times, cluster)), ring_s(aggregation, links)


def _joint_row(told: dict[str, Any], foreseen: tuple[JointPlan, float, float]) -> Row:
    plan, compute_s, plain_s = foreseen
    balanced_s = compute_s + plain_s
    step_s = {name: median(told["seconds"][name]) for name in NAMES}
    faster = {name: step_s["balanced"] / step_s[name] for name in NAMES}
    factors = {"shares": balanced_s / plan.separate_s, "joint": balanced_s / plan.step_s}
    # By all-reduce as the planner saw it in its first steps, and alone, all beginning together.
    others = {"planner": told["ends"]["joint"]["plans"][1][2], "alone": told["plain_s"]}
    off = faster["joint"] / factors["joint"] - 1
    ends = told["ends"]
    sound = all(end["alike"] and end["finite"] for end in ends.values())
    return Row(
        what=f"joint plan, workers at {SPEEDS} samples/s with links of {MBIT} Mbit/s, "
        f"{4e-6 * NUM_ELEMENTS:g} MB in {CHUNKS} chunks, {SAMPLES} samples",
        bar="faster than balancing compute alone, by the predicted factor +-10 %",
        measured={
            "faster_than_balanced": faster,
            "predicted": factors,
            "predicted_with_all_reduce_as_measured": {
                name: (compute_s + seconds) / plan.step_s for name, seconds in others.items()
            },
            "off": off,
            "joint_to_shares": step_s["shares"] / step_s["joint"],
            "predicted_joint_to_shares": plan.separate_s / plan.step_s,
            "step_s": {name: _spread(told["seconds"][name]) for name in NAMES},
            "predicted_step_s": {"balanced": balanced_s, "joint": plan.step_s},
            "steps_of_each": len(told["seconds"]["joint"]),
            "batch_size": {name: ends[name]["batch_size"] for name in NAMES},
            "plans_of_shares": ends["joint"]["plans"],
            "plans_of_both": ends["joint"]["joint"],
            "parameters_sound": sound,
        },
        met=faster["joint"] > 1 and abs(off) <= 0.1 and sound,
    )


def training(options: argparse.Namespace) -> Iterator[Row]:
    """Let every contestant train over the same links, redrawn again and again."""
    seeds, draws = 1 if options.quick else 2, 1
    every_s = 12.0 if options.quick else EVERY_S
    contestants = [
        {"name": "all-reduce", "policy": "auto", "network": None},
        *(
            {"name": name, "policy": "auto", "network": {"shares": name, "probe": False}}
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


def _spread(seconds: list[float]) -> tuple[float, float, float]:
    """Return median, least and most."""
    return median(seconds), min(seconds), max(seconds)
