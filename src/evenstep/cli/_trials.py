"""All runs of ``evenstep simulate``, in one process or in several."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from .. import sim
from .._types import FloatArray
from ..sim import Scenario, Trial
from ..sim._rows import read_rows

FEW = 8
"""Up to so many runs, other processes are not worth their start."""


@dataclass(frozen=True, slots=True)
class Case:
    """Workers to be simulated, by what it takes to make them again in another process.

    Attributes:
        name: of the scenario, or of the trace.
        global_batch_size: samples per step.
        trace: the file; None if the scenario is drawn.
        intercept_s: fixed costs in a trace, one number or one each; None where none were given.
        world_size, num_steps, seed: of a scenario that is drawn.
    """

    name: str
    global_batch_size: int
    trace: Path | None = None
    intercept_s: tuple[float, ...] | None = None
    world_size: int = 8
    num_steps: int = 600
    seed: int | None = None

    def given(self) -> Scenario:
        """Return the workers and their times."""
        if self.trace is not None:
            fixed = self.intercept_s
            cost_s = None if fixed is None else np.array(fixed if len(fixed) > 1 else fixed[0])
            return sim.read_trace(self.trace, intercept_s=cost_s)
        return sim.scenario(self.name, self.world_size, self.num_steps, self.seed or 0)


@dataclass(frozen=True, slots=True)
class Task:
    """One run."""

    case: Case
    policy: str
    scheme: str
    move_cost: float


@dataclass(frozen=True, slots=True)
class Done:
    """One run and what came of it."""

    task: Task
    trial: Trial


def tasks_of(
    cases: Sequence[Case], policies: Sequence[str], schemes: Sequence[str], move_cost: float
) -> list[Task]:
    """Return every policy under every scheme in every case."""
    return [Task(*each, move_cost) for each in product(cases, policies, schemes)]


def play_all(tasks: Sequence[Task], *, jobs: int | None, tell: Callable[[], None]) -> list[Done]:
    """Return what came of every task, in their order.

    Args:
        tasks: what to run.
        jobs: processes; None is one per CPU, or this one alone where there is little to do.
        tell: called after each run.
    """
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


def play(task: Task) -> Done:
    """Return what came of one task."""
    given, best_s = _prepared(task.case)
    trial = sim.trial(
        task.policy,
        given,
        task.case.global_batch_size,
        scheme=task.scheme,
        move_cost=task.move_cost,
        best_s=best_s,
    )
    return Done(task, trial)


@lru_cache(maxsize=8)
def _prepared(case: Case) -> tuple[Scenario, FloatArray]:
    """Return the workers and the best plan's step times; tasks of a case follow each other."""
    given = case.given()
    return given, sim.oracle_on(given.cluster(case.global_batch_size), given.workload)


def recorded_batch(trace: Path) -> int:
    """Return the samples of most steps of a trace, its global batch."""
    samples: Counter[int] = Counter()
    for row in read_rows(trace):
        samples[row.step] += row.samples
    return Counter(samples.values()).most_common(1)[0][0]


def _leave_interrupts() -> None:
    """Leave Ctrl-C to the process that waits for this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
