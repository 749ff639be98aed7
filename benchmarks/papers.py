"""The papers' own machines: each paper's rule, `auto` and the equal split, beside its figure.

Times are lines through what a paper reports; figures are how many times as fast as the equal split
a run is, its first steps included. What a paper leaves out is not made up: where only a figure is
known, speeds are the least that allow it (``inferred``), and where not even that is to be had, the
row says so. Jitter of 2 % is ours, and drawn by seed: without any, two rules that learn all of it
from one step differ by how they take that step alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from benchmarks._common import Row, main, progress
from benchmarks._setups import PER_WORKER, SETUPS, SetUp, four_gpus
from benchmarks.policies import dynamic_batching, lb_bsp, lbb
from evenstep import AffineTime, Cluster, allocate, apportion, sim
from evenstep.policies import AbstractPolicy, Lbb
from evenstep.sim import CurveWorkload
from tests.policies.simulated import above_best, jitter, measured, unlike_workers

JITTER = 0.02
NOT_KNOWN = (
    (
        "LB-BSP, CPU clusters under other jobs' load",
        "38.7 % (second-hand)",
        "neither speeds nor free CPU and memory are known; `python -m benchmarks.narx` has others",
    ),
    (
        "LBB, seconds per epoch: 62.44 to 22.12",
        "2.82",
        "its 98 steps save 28 s of computing and 40 s in all: communication changed, not said how",
    ),
    ("OmniLearn, asynchronous", "+6.9 % accuracy", "no steps in common, and no model trained"),
)


def gains(
    given: SetUp, rules: list[str | AbstractPolicy], num_steps: int, noise: list[np.ndarray | None]
) -> list[float]:
    """Return how many times as fast as the equal split each rule is, over runs with each noise."""
    times = given.times
    slope_s = np.tile(times.slope_s, (num_steps, 1))

    def mean_s(rule: str | AbstractPolicy) -> float:
        runs = [
            sim.run(rule, given.cluster, sim.Workload(times.intercept_s, slope_s, factors))
            for factors in noise
        ]
        return float(np.mean([run.step_s.mean() for run in runs]))

    equal_s = mean_s("equal")
    return [equal_s / mean_s(rule) for rule in rules]


def set_up(given: SetUp, num_steps: int, num_seeds: int) -> Row:
    """Run one paper's machines by its own rule and by `auto`."""
    own: list[str | AbstractPolicy] = [given.rule, "auto"]
    noise: list[np.ndarray | None] = [
        jitter(JITTER, num_steps, given.times.world_size, seed) for seed in range(num_seeds)
    ]
    theirs, ours = gains(given, own, num_steps, noise)
    calm = gains(given, own, num_steps, [None])
    best_s = given.times.seconds(allocate(given.times, given.cluster)).max()
    figures = {
        "paper": given.paper,
        "speeds": (given.equal_s.max() / given.equal_s).tolist(),
        "bound": given.bound,
        "best_split": float(given.equal_s.max() / best_s),
        "fastest_alone": given.fastest_alone,
        given.rule: theirs,
        "auto": ours,
        "without_jitter": calm,
    }
    if given.rule == "lbb":
        profiled = Lbb(tuple(given.times.intercept_s.tolist()))
        (figures["lbb_told_the_fixed_costs"],) = gains(given, [profiled], num_steps, noise)
    what = f"{given.what}{' (speeds inferred)' if given.inferred else ''}"
    return Row(what, f"auto >= {given.rule}", figures, ours >= theirs)


def slowed_gpu(num_steps: int) -> Row:
    """LBB's test of a change: 50 ms more on one GPU, which one is not said, so each in turn."""
    times, cluster = four_gpus(), Cluster(4, 4 * PER_WORKER)
    apart: dict[str, list[float]] = {"lbb": [], "auto": []}
    mean_s = {"equal": 0.0, "lbb": 0.0, "auto": 0.0}
    for rank in range(4):
        slowed = AffineTime(times.intercept_s + 0.05 * (np.arange(4) == rank), times.slope_s)
        workload = CurveWorkload([times] * num_steps + [slowed] * num_steps)
        for rule in mean_s:
            run = sim.run(rule, cluster, workload)
            mean_s[rule] += float(run.step_s.mean()) / 4
            if rule != "equal":
                end_s = run.compute_s[num_steps + (1 if rule == "lbb" else 2)]
                apart[rule].append(float(np.ptp(end_s) / end_s.mean()))
    return Row(
        "LBB, +50 ms on one of its GPUs, each in turn",
        "auto >= lbb",
        {
            "paper": "SE < 0.1 after one rapid step",
            "lbb_SE_after_1": apart["lbb"],
            "auto_SE_after_2": apart["auto"],
            "lbb": mean_s["equal"] / mean_s["lbb"],
            "auto": mean_s["equal"] / mean_s["auto"],
        },
        mean_s["auto"] <= mean_s["lbb"],
    )


def three_gpus() -> Row:
    """What the slowest of LBB's cards is worth: the baseline that the paper leaves out."""
    times = four_gpus()
    three = AffineTime(times.intercept_s[:3], times.slope_s[:3])
    sizes = allocate(times, Cluster(4, 512))
    without_s = three.seconds(allocate(three, Cluster(3, 512))).max()
    return Row(
        "LBB, its balanced sizes, and without the GTX 750",
        "reported; the lines are such that four end at 104.9 ms",
        {
            "sizes": sizes.tolist(),
            "four_ms": 1e3 * float(times.seconds(sizes).max()),
            "three_ms": 1e3 * float(without_s),
        },
    )


def fixed_costs() -> Iterator[Row]:
    """What a fixed cost does to the bound, to one resize by speeds, and to sizes left to grow."""
    trio = AffineTime(np.full(3, 5.0), np.array([1.0, 1.0, 5.0]))
    equal, cluster = np.full(3, 32), Cluster(3, 96)
    each_s = trio.seconds(equal)
    speed, longest_s = equal / each_s, each_s.max()
    grown = equal.astype(np.float64)
    for _ in range(100):
        each_s = 5.0 + trio.slope_s * grown
        grown *= each_s.mean() / each_s
    bound = float(speed.sum() / (3 * speed.min()))
    gain = float(longest_s / trio.seconds(allocate(trio, cluster)).max())
    yield Row(
        "t = 5 + c b, c = (1, 1, 5), 32 samples each",
        "past the bound, at 3.39 in parts of samples; sizes never renormalised add up to 157.7",
        {
            "bound": bound,
            "gain": gain,
            "sum_of_sizes": float(grown.sum()),
        },
        gain > bound and bool(abs(grown.sum() - 157.7) < 0.1),
    )
    above = {}
    for size in (64, 256, 1024):
        cluster, found = Cluster(8, size), []
        for seed in range(100):
            intercept_s, slope_s = unlike_workers(seed)
            equal = np.full(8, size // 8)
            timings = measured(equal, intercept_s + slope_s * equal)
            shares = timings.batch_size / timings.compute_s
            sizes = apportion(shares, cluster)
            found.append(above_best([sizes], cluster, intercept_s, slope_s)[0])
        above[f"B={size}"] = 100 * float(np.mean(found))
    yield Row(
        "in proportion to speeds once, 8 workers with fixed costs: % above the best split",
        "reported; with other fixed costs, 28 / 12 / 4 were found",
        above,
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each answer as it is ready."""
    num_steps, num_seeds = (100 if options.quick else 300), 8
    progress(f"{len(SETUPS)} set-ups, {num_seeds} runs of {num_steps} steps each")
    yield from (set_up(given, num_steps, num_seeds) for given in SETUPS)
    for what, paper, why in NOT_KNOWN:
        yield Row(what, "reported", {"paper": paper, "not simulated": why})
    yield from (slowed_gpu(98), three_gpus(), dynamic_batching(), lbb(), lb_bsp())
    yield from fixed_costs()


if __name__ == "__main__":
    main(__doc__ or "", rows)
