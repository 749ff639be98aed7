"""Simulated runs with known causes of waiting, and what a recorder would see of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks._injected import (
    BACKWARD,
    FORWARD,
    NUM_OWN,
    Drawn,
    Injection,
    draw_injection,
    inject,
    undisturbed,
)
from evenstep._diagnosis import Cause, Diagnoser, HostClues, Phase, StepClues


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run as it is recorded.

    Attributes:
        spent_us: by step, rank and phase.
        clues: by step and rank.
        hosts: by second and rank.
        waiting_share: part of all ranks' time that they truly waited for others.
        injections: what was done to it.
    """

    spent_us: list[list[tuple[int, ...]]]
    clues: list[list[StepClues]]
    hosts: list[list[HostClues]]
    waiting_share: float
    injections: tuple[Injection, ...]


def record(run: Drawn) -> Recorded:
    """Have the ranks run through their steps, and meet."""
    num_steps, world_size = run.own.shape[:2]
    spent = np.zeros((num_steps, world_size, len(Phase)))
    spent[:, :, :NUM_OWN] = run.own
    late = [Phase.OPTIMIZER, Phase.EVALUATION, Phase.CHECKPOINT, Phase.REST]
    at = np.zeros(world_size)
    waited = 0.0

    def meet(step: int, phase: Phase, lasts: float) -> None:
        nonlocal at, waited
        leave = at.max() + lasts
        waited += float((at.max() - at).sum())
        spent[step, :, phase] = leave - at
        at = np.full(world_size, leave)

    for step in range(num_steps):
        own = run.own[step]
        if run.meets == "forward":
            meet(step, Phase.MEETING, 0.001 * run.step_us)
        at = at + own[:, FORWARD] + own[:, BACKWARD]
        meet(step, Phase.REDUCTION, float(run.exchange[step]))
        at = at + own[:, late].sum(axis=1)
        if run.meets == "input":
            meet(step, Phase.MEAN, 0.001 * run.step_us)
        at = at + own[:, Phase.INPUT]
    clues = np.stack([run.collected, run.compiled, run.size], axis=2).round().astype(int).tolist()
    return Recorded(
        spent_us=[[tuple(rank) for rank in step] for step in spent.round().astype(int).tolist()],
        clues=[[StepClues(*rank) for rank in step] for step in clues],
        hosts=_looks(run, spent),
        waiting_share=waited / float(spent.sum()),
        injections=tuple(run.injections),
    )


def _looks(run: Drawn, spent: np.ndarray) -> list[list[HostClues]]:
    """Return what each rank sees of its machine, once a second."""
    lasted_s = spent.sum(axis=2) / 1e6
    second = np.cumsum(lasted_s[:, 0]).astype(int)
    looks = []
    for now in np.unique(second):
        steps = np.flatnonzero(second == now)
        last_s = lasted_s[steps]
        looks.append(
            [
                HostClues(
                    step=int(steps[-1]),
                    lasted_s=float(last_s[:, rank].sum()),
                    throttled_s=float((run.quota[steps, rank] * last_s[:, rank]).sum()),
                    run_delay_s=float((run.delay[steps, rank] * last_s[:, rank]).sum()),
                    major_faults=int((run.faults[steps, rank] * last_s[:, rank]).sum()),
                )
                for rank in range(run.own.shape[1])
            ]
        )
    return looks


def feed(run: Recorded, *, with_clues: bool = True) -> Diagnoser:
    """Return a diagnoser that was shown the run, asked once a second as it went on."""
    diagnoser = Diagnoser(len(run.spent_us[0]))
    looks = iter(run.hosts)
    due_us = 1e6
    for step, (spent_us, clues) in enumerate(zip(run.spent_us, run.clues, strict=True)):
        diagnoser.add(step, spent_us, clues if with_clues else None)
        due_us -= sum(spent_us[0])
        if due_us <= 0 or step == len(run.spent_us) - 1:
            due_us = 1e6
            for rank, look in enumerate(next(looks, [])):
                if with_clues:
                    diagnoser.add_host(rank, look)
            diagnoser.diagnose()
    return diagnoser


def drawn(seed: int, causes: Sequence[Cause]) -> Recorded:
    """Return the run of a seed with these causes, on ranks of their own where there are enough."""
    rng = np.random.default_rng(seed)
    run = undisturbed(rng)
    world_size = run.own.shape[1]
    taken: list[int] = []
    for cause in causes:
        one = draw_injection(rng, cause, world_size)
        if one.rank in taken and len(taken) < world_size:
            free = [rank for rank in range(world_size) if rank not in taken]
            one = replace(one, rank=int(rng.choice(free)))
        taken += [] if one.rank is None else [one.rank]
        inject(rng, run, one)
    return record(run)
