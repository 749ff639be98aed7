"""What it costs that short steps have one plan together, until the step at which the next is due.

Simulated workers under the planner of training: nothing here depends on the machine. Each scenario
is scaled so that the best plan's step takes 60, 20 or 5 ms. Beside the rule stands a plan for every
step, which no run of short steps can have: it takes rank 0 a millisecond, and every rank a message.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, ClassVar, final

import numpy as np

from benchmarks._common import Row, main, progress
from benchmarks._scenarios import NAMES
from evenstep import Cluster, Decision, StepTimings, sim
from evenstep._planner import ClaimSwitch, Planner, Report
from evenstep.claims import Hybrid
from evenstep.policies import AbstractPolicy, Auto
from evenstep.sim import Scenario, scenario
from evenstep.sim._deciders import job_of

STEPS_S = (0.060, 0.020, 0.005)
WORLD_SIZE, BATCH_SIZE = 8, 512
ONSET, TIMES = 303, 100.0  # the step from which one worker takes so many times as long
WAYS = ("due", "every step")
Task = tuple[str, str, float, int]  # way, scenario, seconds of a step, seed


@final
@dataclass(frozen=True)
class EveryStep(AbstractPolicy[Any]):
    """Another policy, shown each step by itself."""

    policy: AbstractPolicy[Any]
    name: ClassVar[str] = "every step"

    def init(self, cluster: Cluster) -> Decision[Any]:
        """Return what the policy begins with."""
        return self.policy.init(cluster)

    def update(self, cluster: Cluster, timings: StepTimings, state: Any) -> Decision[Any]:
        """Return what the policy makes of one step."""
        return self.policy.update(cluster, timings, state)


@dataclass(frozen=True)
class Played:
    """What a run was like.

    Attributes:
        step_s: seconds of each step.
        due: by step, the step at which the next plan was due then.
        sizes: by step.
    """

    step_s: Any
    due: list[int]
    sizes: list[tuple[int, ...]]


def play(given: Scenario, policy: AbstractPolicy[Any]) -> Played:
    """Run a scenario: what was measured is shown when a plan is due, and holds from the next."""
    cluster, workload = given.cluster(BATCH_SIZE), given.workload
    planner = Planner(policy, job_of(cluster), warm_up_steps=0)
    played = Played(np.zeros(given.num_steps), [], [])
    due, shown = 0, []
    for step in range(given.num_steps):
        sizes = np.array(planner.plan.batch_size)
        compute_s = workload.seconds(step, sizes)
        shown.append((step, StepTimings(sizes, compute_s, np.zeros(len(sizes)))))
        played.step_s[step] = compute_s.max()
        played.due.append(due)
        played.sizes.append(planner.plan.batch_size)
        if step == due:
            for number, timings in shown:
                planner.observe_timings(number, timings, next_step=step + 1)
            due, shown = step + planner.hold, []
    return played


def drawn(name: str, step_s: float, seed: int) -> Scenario:
    """Return a scenario whose steps take so long: under the best plan they take 0.1 s unscaled."""
    given = scenario("static" if name == "onset" else name, world_size=WORLD_SIZE, seed=seed)
    slope_s = given.slope_s * (step_s / 0.1)
    if name == "onset":
        slope_s[ONSET:, 0] *= TIMES
    return replace(given, intercept_s=given.intercept_s * (step_s / 0.1), slope_s=slope_s)


def percent(task: Task) -> tuple[float, int]:
    """Return one run's regret in percent, and how many steps an onset kept the old sizes for."""
    way, name, step_s, seed = task
    given = drawn(name, step_s, seed)
    played = play(given, Auto() if way == "due" else EveryStep(Auto()))
    best_s = sim.oracle(given.cluster(BATCH_SIZE), given.workload).mean()
    kept = [sizes == played.sizes[ONSET] for sizes in played.sizes[ONSET:]]
    return 100 * float(played.step_s.mean() / best_s - 1), ([*kept, False]).index(False)


def regrets(pool: ProcessPoolExecutor, num_seeds: int) -> Iterator[Row]:
    """Compare the two, scenario by scenario and on average."""
    for step_s in STEPS_S:
        progress(f"steps of {step_s * 1e3:g} ms")
        names = [*NAMES, "onset"]
        tasks = [(way, name, step_s, n) for way in WAYS for name in names for n in range(num_seeds)]
        found = np.array(list(pool.map(percent, tasks, chunksize=4)))
        found = found.reshape(len(WAYS), len(names), num_seeds, 2)
        means = found[..., 0].mean(axis=2).round(2)
        due, each = (float(row[: len(NAMES)].mean()) for row in means)
        bar = "reported" if step_s < STEPS_S[1] else "at most 0.5 points more"
        yield Row(
            f"steps of {step_s * 1e3:g} ms, {num_seeds} seeds: regret in %",
            bar,
            {
                way: {**dict(zip(NAMES, row.tolist(), strict=False)), "mean": round(mean, 2)}
                for way, row, mean in zip(WAYS, means, (due, each), strict=True)
            },
            None if bar == "reported" else due <= each + 0.5,
        )
        yield Row(
            f"steps of {step_s * 1e3:g} ms: a worker takes {TIMES:g} times as long from a step on",
            "reported: steps with the old sizes, and regret in %",
            {
                way: {"steps": int(found[at, -1, :, 1].max()), "regret": float(means[at, -1])}
                for at, way in enumerate(WAYS)
            },
        )


def stops() -> Iterator[Row]:
    """Say how long a request to stop waits: until the step that is due, wherever it comes."""
    for step_s in STEPS_S:
        played = play(drawn("static", step_s, 0), Auto())
        waits = [due + 1 - step for step, due in enumerate(played.due)]
        worst_s = max(sum(played.step_s[k : k + n]) for k, n in enumerate(waits[:-40]))
        yield Row(
            f"steps of {step_s * 1e3:g} ms: a request to stop is followed",
            "at most 50 ms after the end of the step that it comes in, and a tenth",
            {"steps": max(waits), "seconds": float(worst_s)},
            worst_s <= 1.1 * 0.05 + 2 * step_s,
        )


def claims() -> Iterator[Row]:
    """Say when plans are due where samples are up for claims."""
    switch = ClaimSwitch(Hybrid(), adaptive=False)
    job = replace(job_of(Cluster(2, 64)), cuts=True)
    planner, holds = Planner(Auto(), job, claims=switch), []
    for step in range(100):
        sizes = planner.plan.batch_size
        reports = [Report(step, size, 64, 0.005, 0.0, wall_s=0.005) for size in sizes]
        planner.observe(reports, next_step=step + 1)
        holds.append(planner.hold)
    bar = "every step"
    yield Row(
        "steps of 5 ms with claims: a plan is due", bar, {"steps": holds[-1]}, set(holds) == {1}
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each answer as it is ready."""
    yield from claims()
    yield from stops()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool:
        yield from regrets(pool, 1 if options.quick else options.seeds)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the number of seeds."""
    parser.add_argument("--seeds", type=int, default=8, help="runs of every scenario")


if __name__ == "__main__":
    main(__doc__ or "", rows, add_options)
