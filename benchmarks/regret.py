"""What each policy loses against the perfect-foresight oracle, scenario by scenario.

Simulated workers: nothing here depends on the machine but how long it takes. Constants of `auto`
were chosen on seeds from 1000; these are seeds from 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np

from benchmarks._common import Row, main, progress
from evenstep import AffineTime, Cluster, Decision, StepTimings, allocate
from evenstep.policies import AbstractPolicy, Auto, DynamicBatching, Equal, Lbb, LbBsp2020
from evenstep.policies._base import equal_split
from evenstep.prediction import AbstractPredictor, Ema
from evenstep.sim import Scenario, oracle, read_trace, run, scenario
from evenstep.sim._scenarios import scenario_names

TRACES = Path(__file__).parent / "traces"
NAMES = scenario_names()[:8]
BARS = dict(zip(NAMES, (0.5, 2, 6.5, 10, 1, 2, 2, 6), strict=True))
WORLD_SIZES = (4, 8, 32)
Task = tuple[str, str, int, int]  # rule, scenario, workers, seed


@final
@dataclass(frozen=True, slots=True)
class Foreseen(AbstractPolicy[Any]):
    """The exact split for the speeds that one predictor foresees, told the true fixed costs.

    Args:
        predictor: foresees speeds in samples per second.
        intercept_s: fixed cost of every worker, ``(world_size,)``.
    """

    name: ClassVar[str] = "foreseen"

    predictor: AbstractPredictor[Any]
    intercept_s: tuple[float, ...]

    def init(self, cluster: Cluster) -> Decision[Any]:
        return Decision(equal_split(cluster), self.predictor.init(cluster.world_size), "equal")

    def update(self, cluster: Cluster, timings: StepTimings, state: Any) -> Decision[Any]:
        fixed_s = np.minimum(self.intercept_s, 0.99 * timings.compute_s)
        state = self.predictor.update(state, timings.batch_size / (timings.compute_s - fixed_s))
        times = AffineTime(np.array(self.intercept_s), 1 / self.predictor.predict(state))
        return Decision(allocate(times, cluster), state, "as foreseen")


def fixed_s(given: Scenario) -> tuple[float, ...]:
    """Return the true fixed costs, as a profile would tell them."""
    return tuple(given.workload.intercept_s.tolist())


RIVALS: dict[str, Callable[[Scenario], AbstractPolicy[Any]]] = {
    "equal": lambda given: Equal(),
    "ema 0.1": lambda given: Foreseen(Ema(0.1), fixed_s(given)),
    "ema 0.3": lambda given: Foreseen(Ema(0.3), fixed_s(given)),
    "last": lambda given: Foreseen(Ema(1.0), fixed_s(given)),
    "dynamic batching": lambda given: DynamicBatching(),
    "lb-bsp +-5, window 5": lambda given: LbBsp2020(delta=5, window=5),
    "lbb": lambda given: Lbb(fixed_s(given)),
}
"""What `auto` is compared with: one predictor with true fixed costs, and the papers' rules."""


def regret(policy: AbstractPolicy[Any], given: Scenario, global_batch_size: int) -> float:
    """Return mean step time over that of the plan that knows all but the jitter, less 1."""
    cluster, workload = given.cluster(global_batch_size), given.workload
    return run(policy, cluster, workload).regret(oracle(cluster, workload))


def percent(task: Task) -> float:
    """Return one run's regret in percent."""
    who, name, world_size, seed = task
    given = scenario(name, world_size=world_size, seed=seed)
    rule = Auto() if who == "auto" else RIVALS[who](given)
    return 100 * regret(rule, given, 64 * world_size)


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
    rule = Auto() if who == "auto" else RIVALS[who](given)
    return 100 * regret(rule, given, 64 * given.world_size)


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
