"""Every rule against its own paper, passing against lasting slowness, and all of them together.

Simulated workers with known times: nothing here depends on the machine but the time of a
decision.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks._common import Row, main
from evenstep import Cluster, policies
from evenstep.policies import AbstractPolicy, Auto, DynamicBatching, Lbb, LbBsp2020
from evenstep.sim import Workload, run
from tests.policies.simulated import (
    FOUR_GPUS,
    above_best,
    follow,
    jitter,
    largest_change,
    measured,
    sizes_of,
    steps_until,
    unlike_workers,
)

FOUR, EIGHT = Cluster(4, 512), Cluster(8, 512)
DECISION_MS = {8: 1.0, 256: 5.0, 10_000: 50.0}  # most that one may take, by workers


def reacting() -> list[AbstractPolicy]:
    """Return the exported policies that can be built without arguments and react."""
    public = (getattr(policies, name) for name in policies.__all__)
    alone = (Auto, DynamicBatching, LbBsp2020, Lbb)
    return [cls() for cls in public if inspect.isclass(cls) and issubclass(cls, alone)]


def dynamic_batching() -> Row:
    """t = 5 + c b: what it reaches in three rounds."""
    slope_s = np.array([1.0, 1.0, 5.0])
    sizes = sizes_of(follow(DynamicBatching(), Cluster(3, 96), 5.0, [slope_s] * 3))[-1]
    return Row(
        "DynamicBatching: t = 5 + c b, c = (1, 1, 5), B = 96, three rounds",
        "within one sample of (43.6, 43.6, 8.7)",
        {"sizes": sizes.tolist()},
        bool(abs(sizes - [43.6, 43.6, 8.7]).max() <= 1),
    )


def lbb() -> Row:
    """The paper's four GPUs: one rapid step, fine moves, nothing."""
    decisions = follow(Lbb(), FOUR, 0.0, [FOUR_GPUS] * 5)
    before, after = (1e3 * float((FOUR_GPUS * d.batch_size).max()) for d in decisions[:2])
    kinds = []
    for slowest_s in (1.04, 1.2, 1.5):
        policy = Lbb()
        times = measured([128] * 4, [1.0, 1.0, 1.0, slowest_s])
        changed = policy.update(FOUR, times, policy.init(FOUR).state).batch_size - 128
        kinds.append(int(abs(changed).sum() // 2))
    rests = all(d.batch_size.tolist() == decisions[1].batch_size.tolist() for d in decisions[1:])
    return Row(
        "Lbb: its four GPUs, 128 samples each",
        "392.9 ms -> <= 107 ms after one rapid step; one sample below RT, none below FT",
        {
            "before_ms": before,
            "after_ms": after,
            "samples_moved_at_4_18_and_44_percent": kinds,
        },
        after <= 107 and rests and kinds[0] == 0 and kinds[1] == 1 and kinds[2] > 1,
    )


def lb_bsp() -> Row:
    """The same GPUs: moves until balanced or until the first oscillation."""
    moves, stalled = [], 0.0
    for delta in (1, 5, 16):
        num_moves = 0
        decisions = follow(LbBsp2020(delta=delta), FOUR, 0.0, [FOUR_GPUS] * 500)
        for one, other in pairwise(decisions):
            stalled = float(
                np.ptp(FOUR_GPUS * one.batch_size) / (FOUR_GPUS * one.batch_size).mean()
            )
            if other.state["delta"] != delta:
                break
            num_moves += one.batch_size.tolist() != other.batch_size.tolist()
        moves.append(num_moves)
    return Row(
        "LbBsp2020: the same four GPUs at delta 1 / 5 / 16",
        "93 / 19 / 6 moves; 16 stalls at 8 % imbalance",
        {"moves": moves, "imbalance_at_16": stalled},
        moves == [93, 19, 6] and abs(stalled - 0.08) < 0.01,
    )


def jitter_alone(policy: AbstractPolicy, num_seeds: int) -> Row:
    """3 % on every step, after 200 steps to settle."""
    single, total = [], []
    for seed in range(num_seeds):
        intercept_s, slope_s = unlike_workers(seed)
        noise = jitter(0.03, 500, 8, seed)
        decisions = follow(policy, EIGHT, intercept_s, [slope_s] * 500, factors=noise)
        sizes = sizes_of(decisions)[200:]
        single.append(largest_change(sizes))
        total.append(float((abs(sizes - sizes[0]) / sizes[0]).max()))
    return Row(
        f"(a) {policy.name}: 3 % jitter alone, 8 unlike workers, {num_seeds} runs of 500 steps",
        "settled, no worker is moved by more than 5 % of its batch",
        {"largest_move": max(single), "furthest_from_settled": max(total)},
        max(single) <= 0.05,
    )


def single_slow_step(policy: AbstractPolicy, num_seeds: int) -> Row:
    """One worker three times slow for one step, after 60."""
    moves = []
    for seed in range(num_seeds):
        intercept_s, slope_s = unlike_workers(seed)
        factors = jitter(0.02 * (seed % 2), 61, 8, seed)
        factors[60, seed % 8] *= 3
        decisions = follow(policy, EIGHT, intercept_s, [slope_s] * 61, factors=factors)
        moves.append(largest_change(sizes_of(decisions)[-2:]))
    bar = policy.name == "auto"
    return Row(
        f"(b) {policy.name}: one single step 3x slow, {num_seeds} runs",
        "next plan moves by <= 5 %" if bar else "reported",
        {"largest_move": max(moves)},
        max(moves) <= 0.05 if bar else None,
    )


def lasting_change(policy: AbstractPolicy, num_seeds: int) -> Row:
    """One worker twice as slow from step 200 on."""
    steps = []
    for seed in range(num_seeds):
        intercept_s, slope_s = unlike_workers(seed)
        changed = slope_s * (1 + (np.arange(8) == seed % 8))
        noise = jitter(0.02, 600, 8, seed)
        noise[200:] = 1.0  # so that "within 10 %" is the plan's own doing
        slopes_s = [slope_s] * 200 + [changed] * 400
        decisions = follow(policy, EIGHT, intercept_s, slopes_s, factors=noise)
        above = above_best(sizes_of(decisions)[200:], EIGHT, intercept_s, changed)
        steps.append(steps_until(above, 0.10))
    reached = [step for step in steps if step is not None]
    return Row(
        f"(c) {policy.name}: a lasting 2x change of one of 8 workers, {num_seeds} runs",
        "within 10 % of the optimum, for good",
        {
            "steps_median": median(reached) if reached else None,
            "steps_most": max(reached, default=None),
            "runs_that_got_there": len(reached),
        },
        len(reached) == num_seeds,
    )


def pure_noise(policy: AbstractPolicy, num_seeds: int) -> Row:
    """Three equal workers, 8 samples each, whose steps are mostly fixed cost and 30 % noise.

    As in training, where policies that ask for it see several steps of 5 ms at once.
    """
    fixed_s, slopes_s = np.full(3, 5e-3), np.full((500, 3), 1e-5)
    noises = [jitter(0.3, 500, 3, seed) for seed in range(num_seeds)]
    sizes = [
        run(policy, Cluster(3, 24), Workload(fixed_s, slopes_s, noise)).batch_size
        for noise in noises
    ]
    smallest, largest = int(np.min(sizes)), int(np.max(sizes))
    bar = policy.name == "auto"
    return Row(
        f"(d) {policy.name}: pure noise, three equal workers, {num_seeds} runs of 500 steps",
        "8 samples each, always" if bar else "reported",
        {"smallest": smallest, "largest": largest},
        smallest == largest == 8 if bar else None,
    )


def third_plan(num_runs: int) -> Row:
    """No noise: how near the third plan is to the best."""
    above = []
    for seed in range(num_runs):
        intercept_s, slope_s = unlike_workers(seed)
        sizes = sizes_of(follow(Auto(), EIGHT, intercept_s, [slope_s] * 2))
        above.append(float(above_best(sizes, EIGHT, intercept_s, slope_s)[2]))
    return Row(
        f"auto: third plan without noise, 8 unlike workers, {num_runs} runs",
        "<= 2 % above the optimum",
        {"worst": max(above), "median": median(above)},
        max(above) <= 0.02,
    )


def decision_time(policy: AbstractPolicy, world_size: int) -> Row:
    """Milliseconds per update under jitter."""
    intercept_s, slope_s = unlike_workers(0, world_size)
    cluster, noise = Cluster(world_size, 64 * world_size), jitter(0.02, 300, world_size, 0)
    decision, seconds = policy.init(cluster), []
    for factors in noise:
        sizes = decision.batch_size
        timings = measured(sizes, (intercept_s + slope_s * sizes) * factors)
        began_s = perf_counter()
        decision = policy.update(cluster, timings, decision.state)
        seconds.append(perf_counter() - began_s)
    taken_ms, bar_ms = 1e3 * median(seconds), DECISION_MS[world_size]
    bar = policy.name == "auto"
    return Row(
        f"{policy.name}: one decision for {world_size} workers",
        f"<= {bar_ms:g} ms" if bar else "reported",
        {"median_ms": taken_ms},
        taken_ms <= bar_ms if bar else None,
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each answer as it is ready."""
    num_seeds = 3 if options.quick else 8
    yield from (dynamic_batching(), lbb(), lb_bsp(), third_plan(10 * num_seeds))
    for ask in (jitter_alone, single_slow_step, lasting_change, pure_noise):
        for policy in reacting():
            yield ask(policy, num_seeds)
    for policy in reacting():
        yield from (decision_time(policy, world_size) for world_size in DECISION_MS)


if __name__ == "__main__":
    main(__doc__ or "", rows)
