"""``evenstep simulate``: policies on workers that are drawn or recorded, against the best plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from .. import __version__, sim
from .._render._words import number, paragraph, percent, terminal_width, text_table
from ..policies import by_name
from ..policies._by_name import without_settings
from ..sim._scenarios import scenario_names
from ._common import fail, import_from_here, names, refused
from ._length_splits import (
    HiddenSize,
    Lengths,
    Padded,
    check_lengths_alone,
    run_lengths,
    runs_as_json,
    runs_as_text,
)
from ._simulated_workers import Case, WorkersAsked, cases_of, heading, progress

Scenarios = Annotated[
    str | None,
    typer.Option(help=f"Workers by name, comma-separated: {', '.join(scenario_names())}."),
]
Speeds = Annotated[
    str | None, typer.Option(help="Samples per second of each worker, such as 100,80,20.")
]
Noise = Annotated[
    float | None,
    typer.Option(help="Deviation of a step's time as a share, with --speeds (default: 0.02)."),
]
Traces = Annotated[
    list[Path] | None,
    typer.Option(help="A run's folder, its events.jsonl, or a table; several times too."),
]
Intercepts = Annotated[
    str | None,
    typer.Option(help="Fixed seconds of a step, with --speeds or --trace; one, or one each."),
]
Policies = Annotated[
    str | None,
    typer.Option(help="Names or module:Class, comma-separated (default: all without settings)."),
]
WorldSize = Annotated[int | None, typer.Option(help="Workers of scenarios (default: 8).")]
Steps = Annotated[
    int | None, typer.Option(help="Steps that are drawn (default: 600; with --lengths 200).")
]
Seeds = Annotated[int | None, typer.Option(help="Number of seeds, from 0 (default: 4).")]
Samples = Annotated[
    int | None,
    typer.Option(help="Samples per step (default: 64 per worker, or that of the trace)."),
]

_STEPS_BY_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Played:
    """What one policy made of one case.

    Attributes:
        policy: its name, as it was asked for.
        scenario: name of the case's workers.
        seed: of the case.
        global_batch_size: samples per step.
        regret: mean step time over that of the perfect-foresight oracle, less 1.
        step_s: mean seconds of a step.
        best_step_s: the same of the oracle.
        samples_per_s: samples of all workers over the time of all steps.
        idle_share: of the time of all who were there, in [0, 1).
    """

    policy: str
    scenario: str
    seed: int | None
    global_batch_size: int
    regret: float
    step_s: float
    best_step_s: float
    samples_per_s: float
    idle_share: float


def simulate(
    scenario: Scenarios = None,
    speeds: Speeds = None,
    noise: Noise = None,
    trace: Traces = None,
    intercepts: Intercepts = None,
    policy: Policies = None,
    world_size: WorldSize = None,
    steps: Steps = None,
    seeds: Seeds = None,
    global_batch_size: Samples = None,
    lengths: Lengths = None,
    padded: Padded = False,
    hidden_size: HiddenSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Compare policies on simulated workers with the perfect-foresight oracle."""
    import_from_here()
    asked = WorkersAsked(
        scenario=scenario,
        speeds=speeds,
        noise=noise,
        traces=trace or (),
        intercepts=intercepts,
        world_size=world_size,
        steps=steps,
        seeds=seeds,
        global_batch_size=global_batch_size,
    )
    try:
        if lengths is None:
            check_lengths_alone("simulate", padded=padded, hidden_size=hidden_size)
            cases = cases_of(asked)
            runs = _play(cases, policy)
            answer, text = _as_json(cases, runs), _as_text(cases, runs, terminal_width())
        else:
            cases = cases_of(_with_lengths(asked, policy))
            by_length = run_lengths(cases, lengths, padded=padded, hidden_size=hidden_size)
            text = runs_as_text(cases, by_length, terminal_width())
            answer = runs_as_json(by_length)
    except ValueError as error:
        fail(str(error), 2)
    typer.echo(json.dumps(answer, indent=2) if as_json else text)


def _with_lengths(asked: WorkersAsked, policy: str | None) -> WorkersAsked:
    """Return the workers on which ways to split are compared; recorded steps have no lengths."""
    for option, value in (("--policy", policy), ("--trace", asked.traces)):
        if value:
            remedy = "Four ways to split are compared there, on drawn workers."
            raise refused("simulate", option, "be left out with --lengths", value, remedy)
    if asked.scenario is None and asked.speeds is None:
        asked = replace(asked, scenario="static")
    return replace(asked, steps=_STEPS_BY_LENGTH) if asked.steps is None else asked


def _play(cases: Sequence[Case], policy: str | None) -> list[Played]:
    """Return what every policy makes of every case."""
    chosen = without_settings() if policy is None else names("simulate", "--policy", policy)
    try:
        policies = [(name, by_name(name)) for name in chosen]
    except ValueError as error:
        raise ValueError(f"`evenstep simulate --policy`: {error}") from error
    runs = []
    for case in progress(cases):
        cluster, workload = case.given.cluster(case.global_batch_size), case.given.workload
        best_s = sim.oracle(cluster, workload)
        for name, each in policies:
            report = sim.run(each, cluster, workload)
            run = Played(
                policy=name,
                scenario=case.given.name,
                seed=case.seed,
                global_batch_size=case.global_batch_size,
                regret=report.regret(best_s),
                step_s=float(report.step_s.mean()),
                best_step_s=float(best_s.mean()),
                samples_per_s=report.samples_per_s,
                idle_share=report.idle_share,
            )
            runs.append(run)
    return runs


def _standings(runs: Sequence[Played]) -> list[dict[str, Any]]:
    """Return means over the scenarios for each policy, however many seeds each has; best first."""
    found: dict[str, dict[str, list[Played]]] = {}
    for run in runs:
        found.setdefault(run.policy, {}).setdefault(run.scenario, []).append(run)

    def mean(name: str, some: Sequence[Played]) -> float:
        return fmean(getattr(run, name) for run in some)

    lines: list[dict[str, Any]] = [
        {
            "policy": policy,
            "regret": {name: mean("regret", some) for name, some in rows.items()},
            "mean_regret": fmean(mean("regret", some) for some in rows.values()),
            "samples_per_s": fmean(mean("samples_per_s", some) for some in rows.values()),
            "idle_share": fmean(mean("idle_share", some) for some in rows.values()),
        }
        for policy, rows in found.items()
    ]
    return sorted(lines, key=lambda line: line["mean_regret"])


def _as_json(cases: Sequence[Case], runs: Sequence[Played]) -> dict[str, Any]:
    """Return all of it as plain values; shares are fractions of 1."""
    recorded = {case.given.name: case.recorded_s for case in cases if case.seed is None}
    return {
        "evenstep": __version__,
        "standings": _standings(runs),
        "runs": [asdict(run) for run in runs],
        "recorded_step_s": recorded,
    }


def _as_text(cases: Sequence[Case], runs: Sequence[Played], width: int | None) -> str:
    """Return the table for a terminal of ``width`` columns, or of any."""
    columns = list(dict.fromkeys(run.scenario for run in runs))
    alone = len(columns) == 1
    header = ["policy", *columns, "samples/s" if alone else "mean", "idle"]
    rows = [
        [
            line["policy"],
            *(percent(line["regret"][name]) for name in columns),
            number(line["samples_per_s"]) if alone else percent(line["mean_regret"]),
            percent(line["idle_share"]),
        ]
        for line in _standings(runs)
    ]
    head = f"Mean step time above the perfect-foresight oracle's, in %: {heading(cases)}."
    notes = [paragraph(text, width) for text in _recorded_notes(cases, runs)]
    return "\n\n".join([paragraph(head, width), text_table(header, rows, width=width), *notes])


def _recorded_notes(cases: Sequence[Case], runs: Sequence[Played]) -> Iterator[str]:
    best_s = {run.scenario: run.best_step_s for run in runs}
    for case in cases:
        if case.recorded_s is not None:
            above = percent(case.recorded_s / best_s[case.given.name] - 1)
            yield (
                f"As recorded, a step of {case.given.name} took {number(case.recorded_s)} s in "
                f"the mean, {above} % above the oracle's."
            )
