"""One policy under one scheme in one scenario, and how many of them compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .._types import FloatArray
from ..planner.claims import AbstractScheme
from ..policies import AbstractPolicy
from ._run import oracle_on, run_on
from ._scenario import Scenario
from ._scheme_names import scheme_by_name


@dataclass(frozen=True, slots=True)
class Trial:
    """What one policy made of one scenario under one scheme.

    Attributes:
        scenario: its name.
        policy: its name, as it was asked for.
        scheme: likewise.
        regret: mean time for a sample, over that of the perfect-foresight oracle
            (``oracle``), less 1. Equal global batches make it ``SimReport.regret``.
        step_s: mean seconds of a step.
        best_step_s: the same of that plan.
        samples_per_s: samples of all workers over the time of all steps.
        idle_share: of the time of all who were there, in [0, 1).
        staleness: most local steps since the last average when one began; 0 where gradients
            meet in every step.
        moves_per_step: claims and hand-overs.
    """

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


@dataclass(frozen=True, slots=True)
class Standing:
    """How a policy under a scheme did over all scenarios: means over the trials of each.

    Attributes:
        policy: its name.
        scheme: its name.
        regret: mean over the trials of each scenario.
        mean_regret: mean over the scenarios.
        samples_per_s: likewise, as are the two below.
        idle_share: of the time of all.
        moves_per_step: claims and hand-overs.
        staleness: the most of all trials.
    """

    policy: str
    scheme: str
    regret: dict[str, float]
    mean_regret: float
    samples_per_s: float
    idle_share: float
    moves_per_step: float
    staleness: int


def trial(
    policy: str | AbstractPolicy[Any],
    given: Scenario,
    global_batch_size: int,
    *,
    scheme: str | AbstractScheme[Any] = "bsp",
    move_cost: float = 0.01,
    best_s: FloatArray | None = None,
) -> Trial:
    """Return what ``policy`` makes of ``given`` under ``scheme``.

    Args:
        policy: by name or by value.
        given: workers and their times.
        global_batch_size: samples per step.
        scheme: by name, as for ``scheme_by_name``, or by value.
        move_cost: what a claim of a scheme given by name takes, as a share of the best plan's
            mean step.
        best_s: step times of ``oracle_on`` if known already, ``(num_steps,)``.

    Raises:
        ValueError: no such policy or scheme; caps that do not hold the global batch; a policy
            that breaks its contract.
    """
    cluster, workload = given.cluster(global_batch_size), given.workload
    known_s = oracle_on(cluster, workload) if best_s is None else best_s
    best_step_s = float(known_s.mean())
    name = scheme if isinstance(scheme, str) else type(scheme).__name__
    if isinstance(scheme, str):
        scheme = scheme_by_name(scheme, move_s=move_cost * best_step_s)
    report = run_on(policy, cluster, workload, scheme=scheme)
    return Trial(
        scenario=given.name,
        policy=policy if isinstance(policy, str) else policy.name,
        scheme=name,
        regret=global_batch_size / best_step_s / report.samples_per_s - 1,
        step_s=float(report.step_s.mean()),
        best_step_s=best_step_s,
        samples_per_s=report.samples_per_s,
        idle_share=report.idle_share,
        staleness=int(report.staleness.max()),
        moves_per_step=float(report.num_moves.mean()),
    )


def standings(trials: Iterable[Trial]) -> tuple[Standing, ...]:
    """Return one line for each policy and scheme, the lowest mean regret first.

    Every scenario counts the same, however many trials it has. Equals stay in the order in which
    they came.
    """
    found: dict[tuple[str, str], dict[str, list[Trial]]] = {}
    for each in trials:
        rows = found.setdefault((each.policy, each.scheme), {})
        rows.setdefault(each.scenario, []).append(each)
    lines = [_standing(policy, scheme, rows) for (policy, scheme), rows in found.items()]
    return tuple(sorted(lines, key=lambda line: line.mean_regret))


def _standing(policy: str, scheme: str, rows: dict[str, list[Trial]]) -> Standing:
    def mean(name: str) -> float:
        return fmean(_mean(trials, name) for trials in rows.values())

    return Standing(
        policy=policy,
        scheme=scheme,
        regret={scenario: _mean(trials, "regret") for scenario, trials in rows.items()},
        mean_regret=mean("regret"),
        samples_per_s=mean("samples_per_s"),
        idle_share=mean("idle_share"),
        moves_per_step=mean("moves_per_step"),
        staleness=max(each.staleness for trials in rows.values() for each in trials),
    )


def _mean(trials: Sequence[Trial], name: str) -> float:
    return fmean(getattr(each, name) for each in trials)
