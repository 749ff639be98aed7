"""All runs of ``evenstep simulate``, in one process or in several."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from .. import sim
from .._named import built
from .._types import FloatArray
from ..claims import AbstractScheme, Bsp, Hybrid
from ..sim import Scenario
from ..sim._rows import read_rows

FEW = 8
"""Up to so many runs, other processes are not worth their start."""

Asked = TypeVar("Asked")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Case:
    """Workers to be simulated, by what it takes to make them again in another process.

    Attributes:
        name: of the scenario, or of the trace.
        global_batch_size: samples per step.
        trace: the file; None if the scenario is drawn.
        intercept_s: fixed costs in a trace, one number or one each; None where none were given.
        world_size, num_steps, seed: of a scenario that is drawn.
        recorded_s: mean seconds of a step as it was recorded; None where there is none, or where
            it had other samples.
    """

    name: str
    global_batch_size: int
    trace: Path | None = None
    intercept_s: tuple[float, ...] | None = None
    world_size: int = 8
    num_steps: int = 600
    seed: int | None = None
    recorded_s: float | None = None

    def given(self) -> Scenario:
        """Return the workers and their times."""
        if self.trace is not None:
            fixed = self.intercept_s
            cost_s = None if fixed is None else np.array(fixed if len(fixed) > 1 else fixed[0])
            return sim.read_trace(self.trace, intercept_s=cost_s)
        return sim.scenario(self.name, self.world_size, self.num_steps, self.seed or 0)


Task = tuple[Case, str, str, float]
"""Workers, a policy, a scheme, and what a claim takes as a share of the best plan's mean step."""


@dataclass(frozen=True, slots=True)
class Played:
    """What one policy made of one case under one scheme.

    Attributes:
        seed: of a scenario that was drawn; None for a trace.
        global_batch_size: samples per step.
        scenario: its name.
        policy: its name, as it was asked for.
        scheme: likewise.
        regret: mean time for a sample, over that of the plan that knows the future and carries it
            out (``oracle``), less 1. Equal global batches make it ``SimReport.regret``.
        step_s: mean seconds of a step.
        best_step_s: the same of that plan.
        samples_per_s: samples of all workers over the time of all steps.
        idle_share: of the time of all who were there, in [0, 1).
        staleness: most local steps since the last average when one began; 0 where gradients
            meet in every step.
        moves_per_step: claims and hand-overs.
    """

    seed: int | None
    global_batch_size: int
    scenario: str
    policy: str
    scheme: str
    regret: float
    step_s: float
    best_step_s: float
    samples_per_s: float
    idle_share: float
    staleness: int
    moves_per_step: float


def play_all(
    play: Callable[[Asked], Found],
    tasks: Sequence[Asked],
    *,
    jobs: int | None,
    tell: Callable[[], None],
) -> list[Found]:
    """Return what came of every task, in their order."""
    wanted = (os.cpu_count() or 1) if jobs is None and len(tasks) > FEW else jobs or 1
    if wanted == 1 or len(tasks) == 1:
        done = []
        for task in tasks:
            done.append(play(task))
            tell()
        return done
    context = get_context("forkserver")
    with ProcessPoolExecutor(wanted, mp_context=context, initializer=_leave_interrupts) as pool:
        futures = [pool.submit(play, task) for task in tasks]
        try:
            for future in as_completed(futures):
                future.result()
                tell()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def play(task: Task) -> Played:
    """Return what came of one task."""
    case, policy, scheme, move_cost = task
    given, best_s = _prepared(case)
    report = sim.run(
        policy,
        given.cluster(case.global_batch_size),
        given.workload,
        scheme=scheme_by_name(scheme, claim_s=move_cost * float(best_s.mean())),
    )
    return Played(
        seed=case.seed,
        global_batch_size=case.global_batch_size,
        scenario=given.name,
        policy=policy,
        scheme=scheme,
        regret=case.global_batch_size / float(best_s.mean()) / report.samples_per_s - 1,
        step_s=float(report.step_s.mean()),
        best_step_s=float(best_s.mean()),
        samples_per_s=report.samples_per_s,
        idle_share=report.idle_share,
        staleness=int(report.staleness.max()),
        moves_per_step=float(report.num_moves.mean()),
    )


def scheme_by_name(name: str, *, claim_s: float = 0.0) -> AbstractScheme[Any]:
    """Return the scheme called ``name``, with its defaults.

    Raises:
        ValueError: there is no such scheme, or it cannot be built without arguments.
    """
    known = {"bsp": Bsp, "hybrid": Hybrid}
    scheme: AbstractScheme[Any] = built(name, AbstractScheme, known, caller="scheme_by_name")
    return Hybrid(claim_s=claim_s) if name == "hybrid" else scheme


@lru_cache(maxsize=8)
def _prepared(case: Case) -> tuple[Scenario, FloatArray]:
    """Return the workers and the best plan's step times; tasks of a case follow each other."""
    given = case.given()
    return given, sim.oracle(given.cluster(case.global_batch_size), given.workload)


def recorded_steps(trace: Path) -> tuple[int, float | None]:
    """Return the samples of most steps of a trace, its global batch, and the mean seconds of one.

    The latter is None where steps have other samples, and so say little of each other.
    """
    samples: Counter[int] = Counter()
    slowest_s: defaultdict[int, float] = defaultdict(float)
    for row in read_rows(trace):
        samples[row.step] += row.samples
        slowest_s[row.step] = max(slowest_s[row.step], row.seconds)
    totals = Counter(samples.values())
    step_s = fmean(slowest_s.values()) if len(totals) == 1 else None
    return totals.most_common(1)[0][0], step_s


def _leave_interrupts() -> None:
    """Leave Ctrl-C to the process that waits for this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
