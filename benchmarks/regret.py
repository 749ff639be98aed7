"""What each policy loses against the perfect-foresight oracle, scenario by scenario.

Simulated workers: nothing here depends on the machine but how long it takes. Constants of `auto`
were chosen on seeds from 1000; these are seeds from 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks._common import Row, main, progress
from benchmarks._rivals import AUTO, RIVALS
from benchmarks._scenarios import NAMES, regret
from evenstep.sim import Scenario, read_trace, scenario

TRACES = Path(__file__).parent / "traces"
BARS = dict(zip(NAMES, (0.5, 2, 6.5, 10, 1, 2, 2, 6), strict=True))
WORLD_SIZES = (4, 8, 32)
Task = tuple[str, str, int, int]  # rule, scenario, workers, seed


def percent(task: Task) -> float:
    """Return one run's regret in percent."""
    who, name, world_size, seed = task
    given = scenario(name, world_size=world_size, seed=seed)
    rule = AUTO if who == "auto" else RIVALS[who][0]
    return 100 * regret(rule(given), given, 64 * world_size)


def table(
    pool: ProcessPoolExecutor, rules: list[str], world_size: int, num_seeds: int
) -> dict[str, dict[str, float]]:
    """Return the mean regret of each rule in each scenario."""
    seeds = range(num_seeds)
    tasks = [(who, name, world_size, seed) for who in rules for name in NAMES for seed in seeds]
    found = np.array(list(pool.map(percent, tasks, chunksize=4)))
    means = found.reshape(len(rules), len(NAMES), num_seeds).mean(axis=2).round(2)
    return {
        who: dict(zip(NAMES, row.tolist(), strict=True))
        for who, row in zip(rules, means, strict=True)
    }


def straw_men(pool: ProcessPoolExecutor) -> Iterator[Row]:
    """Compare the single rules with design.md's figures, on its seeds."""
    rules = [who for who, (_, said) in RIVALS.items() if said is not None]
    found = table(pool, ["auto", *rules], 8, 8)
    yield Row("auto, 8 workers, seeds 0 to 7: regret in %", "reported", dict(found["auto"]))
    for who in rules:
        ours, said = list(found[who].values()), RIVALS[who][1]
        assert said is not None
        near = [abs(a - b) <= max(0.2 * b, 0.5) for a, b in zip(ours, said, strict=True)]
        yield Row(
            f"{who}, 8 workers, seeds 0 to 7: regret in %",
            "within 20 % or 0.5 points of the design's table",
            {**found[who], "the design's": said},
            all(near),
        )


def against_all(pool: ProcessPoolExecutor, world_size: int, num_seeds: int) -> Iterator[Row]:
    """Compare `auto` with the best of the others, scenario by scenario and on average."""
    found = table(pool, ["auto", *RIVALS], world_size, num_seeds)
    ours = found.pop("auto")
    best = {name: min(row[name] for row in found.values()) for name in NAMES}
    yield Row(
        f"auto, {world_size} workers, {num_seeds} seeds: regret in %",
        "never more than 1 point above the best other policy of that scenario",
        {**ours, "best other": best},
        all(ours[name] <= best[name] + 1 for name in NAMES),
    )
    means = {who: float(np.mean(list(row.values()))) for who, row in found.items()}
    mean = float(np.mean(list(ours.values())))
    yield Row(
        f"auto, {world_size} workers: mean over all scenarios, in %",
        "strictly best",
        {"auto": mean, **means},
        mean < min(means.values()),
    )
    if world_size == 8:
        yield Row(
            "auto, 8 workers, each scenario's own bar",
            ", ".join(f"{name} {bar}" for name, bar in BARS.items()),
            dict(ours),
            all(ours[name] <= bar for name, bar in BARS.items()),
        )


def mixture(seed: int) -> Scenario:
    """Return eight workers, each of another scenario: who drifts beside who bursts."""
    parts = [scenario(name, world_size=len(NAMES), seed=seed) for name in NAMES]

    def mixed(field: str) -> np.ndarray:
        """Worker k's column of scenario k."""
        return np.stack([getattr(part, field)[..., k] for k, part in enumerate(parts)], axis=-1)

    return Scenario("mixture", mixed("intercept_s"), mixed("slope_s"), mixed("jitter"))


def untuned_percent(task: tuple[str, str, int]) -> float:
    """Return one run's regret in percent on what nobody chose a constant by."""
    who, name, seed = task
    given = mixture(seed) if name == "mixture" else read_trace(TRACES / f"{name}.csv")
    rule = AUTO if who == "auto" else RIVALS[who][0]
    return 100 * regret(rule(given), given, 64 * given.world_size)


def untuned(pool: ProcessPoolExecutor, num_seeds: int) -> Iterator[Row]:
    """Compare `auto` with the others on a mixture, and on recorded contention."""
    rules = ["auto", *RIVALS]
    for name in ("mixture", "hogs", "contention"):
        seeds = range(num_seeds if name == "mixture" else 1)
        tasks = [(who, name, seed) for who in rules for seed in seeds]
        found = np.array(list(pool.map(untuned_percent, tasks))).reshape(len(rules), -1)
        means = dict(zip(rules, found.mean(axis=1).round(2).tolist(), strict=True))
        best = min(value for who, value in means.items() if who != "auto")
        what = "eight workers, each of another scenario" if name == "mixture" else f"trace {name}"
        bar = "within 1 point of the best"
        yield Row(f"{what}: regret in %", bar, means, means["auto"] <= best + 1)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each answer as it is ready."""
    num_seeds = 2 if options.quick else options.seeds
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool:
        if not options.quick:
            progress("the single rules, on the design's seeds")
            yield from straw_men(pool)
        progress("what nobody tuned to")
        yield from untuned(pool, num_seeds)
        for world_size in (8,) if options.quick else WORLD_SIZES:
            progress(f"all policies on {world_size} workers, {num_seeds} seeds")
            yield from against_all(pool, world_size, num_seeds)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the number of seeds."""
    parser.add_argument("--seeds", type=int, default=20, help="runs of every scenario")


if __name__ == "__main__":
    main(__doc__ or "", rows, add_options)
