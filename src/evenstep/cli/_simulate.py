"""``evenstep simulate``: policies on workers that are drawn or recorded, against the best plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from .. import __version__, sim
from .._render import number, paragraph, percent, terminal_width, text_table
from .._types import FloatArray
from ..exceptions import invalid
from ..policies import by_name
from ..policies._by_name import without_settings
from ..sim import Scenario
from ..sim._read_trace import TraceTable
from ..sim._scenarios import scenario_names
from ._common import fail, import_from_here, least, names, numbers, refused, spread, within

_MOST_TIMES = 10**8  # of all workers in all steps: a gigabyte
_MOST_SEEDS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Workers, and the samples that they share in each step.

    Attributes:
        given: the workers and their times; its name heads a column.
        global_batch_size: samples per step.
        seed: by which the times were drawn; None if they were recorded.
        recorded_s: mean seconds of a step as it was recorded; None where there is none, or where
            it had other samples.
    """

    given: Scenario
    global_batch_size: int
    seed: int | None = None
    recorded_s: float | None = None


def _cases(drawn: Iterable[Case], recorded: Iterable[Case]) -> list[Case]:
    """Return the workers that are asked for, drawn ones once for each seed.

    Raises:
        ValueError: something cannot be honoured; the message names the option.
    """
    cases = [*drawn, *recorded]
    for case in cases:
        try:
            case.given.cluster(case.global_batch_size)
        except ValueError as error:
            rule, got = f"suit the workers of {case.given.name!r}", case.global_batch_size
            raise refused("simulate", "--global-batch-size", rule, got, str(error)) from error
    return cases


def _heading(cases: Sequence[Case]) -> str:
    """Return what the columns are: workers, samples, steps, seeds."""
    seeds = sorted({case.seed for case in cases if case.seed is not None})
    drawn = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else "seed 0"
    found = []
    for case in cases:
        given, total = case.given, f"{case.global_batch_size} samples a step"
        if case.seed is None:
            found.append(f"{given.name} at {total}")
        else:
            found.append(f"{given.world_size} workers, {total}, {given.num_steps} steps, {drawn}")
    return "; ".join(dict.fromkeys(found))


def _check_belonging(given: dict[str, Any]) -> None:
    """Raise for options that nothing would heed, and where no workers are named.

    Args:
        given: what was typed, by the names that options have in ``simulate``.
    """
    ways = {"scenario": "--scenario", "speeds": "--speeds", "trace": "--trace"}
    if not any(given[way] for way in ways):
        rule = f"name workers by {' or '.join(ways.values())}"
        remedy = "`evenstep simulate --scenario burst` is an example."
        raise invalid("evenstep simulate", rule, "none", remedy)
    for name, needed in {
        "world_size": ("scenario",),
        "noise": ("speeds",),
        "intercepts": ("speeds", "trace"),
        "steps": ("scenario", "speeds"),
        "seeds": ("scenario", "speeds"),
    }.items():
        if given[name] is not None and not any(given[way] for way in needed):
            rule = f"come with {' or '.join(ways[way] for way in needed)}"
            remedy = "Other workers have their own; leave it out."
            raise refused("simulate", f"--{name}".replace("_", "-"), rule, given[name], remedy)


def _drawn(
    scenario: str | None,
    speeds: str | None,
    *,
    noise: float,
    intercepts: str,
    world_size: int,
    num_steps: int,
    num_seeds: int,
    global_batch_size: int | None,
) -> Iterator[Case]:
    """Yield workers by name, then those of given speeds."""
    found = () if speeds is None else numbers("simulate", "--speeds", speeds)
    known = () if scenario is None else names("simulate", "--scenario", scenario)
    within("simulate", "--world-size", world_size, 1, 100_000, "The default is 8.")
    most = _MOST_TIMES // max(world_size, len(found))
    within("simulate", "--steps", num_steps, 1, most, "The default is 600.")
    within("simulate", "--seeds", num_seeds, 1, _MOST_SEEDS, "The default is 4.")
    for name in known:
        if name not in scenario_names():
            rule = f"hold some of {', '.join(scenario_names())}"
            remedy = "A recorded one is given with --trace."
            raise refused("simulate", "--scenario", rule, repr(name), remedy)
        for seed in range(num_seeds):
            given = sim.scenario(name, world_size, num_steps, seed)
            yield Case(given, global_batch_size or 64 * world_size, seed)
    if found:
        within("simulate", "--noise", noise, 0, 1, "The default is 0.02.")
        fixed_s = _fixed_s(intercepts, len(found))
        slope_s = np.tile(1 / np.array(found), (num_steps, 1))
        for seed in range(num_seeds):
            luck = np.random.default_rng(seed).standard_normal(slope_s.shape)
            given = Scenario("speeds", fixed_s, slope_s, np.exp(noise * luck))
            yield Case(given, global_batch_size or 64 * len(found), seed)


def _fixed_s(text: str, num_workers: int) -> FloatArray:
    found = numbers("simulate", "--intercepts", text, positive=False)
    return np.array(spread("simulate", "--intercepts", found, num_workers))


def _recorded(
    traces: Iterable[Path], intercepts: str | None, global_batch_size: int | None
) -> Iterator[Case]:
    """Yield the workers of recordings, with the global batch that most of their steps had."""
    seen: set[str] = set()
    for file in traces:
        try:
            table, fixed_s = TraceTable(file), None
            if intercepts is not None:
                fixed_s = _fixed_s(intercepts, table.presence.shape[1])
            given = table.scenario(fixed_s)
        except OSError as error:
            remedy = "Give a .csv or a .jsonl file, or the folder of a run."
            rule = "name a file that can be read"
            raise refused("simulate", "--trace", rule, f"{file} ({error})", remedy) from error
        except ValueError as error:
            raise ValueError(f"`evenstep simulate --trace {file}`: {error}") from error
        if given.name in seen:
            remedy = "Rename one: they stand under these in the table."
            raise refused("simulate", "--trace", "name files of different names", file, remedy)
        seen.add(given.name)
        totals = Counter(np.where(table.presence, table.samples, 0).sum(axis=1).tolist())
        total = int(totals.most_common(1)[0][0])
        own = len(totals) == 1 and global_batch_size in (None, total)
        step_s = fmean(table.seconds.max(axis=1).tolist()) if own else None
        yield Case(given, global_batch_size or total, None, step_s)


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
Steps = Annotated[int | None, typer.Option(help="Steps that are drawn (default: 600).")]
Seeds = Annotated[int | None, typer.Option(help="Number of seeds, from 0 (default: 4).")]
Samples = Annotated[
    int | None,
    typer.Option(help="Samples per step (default: 64 per worker, or that of the trace)."),
]


def simulate(
    context: typer.Context,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Compare policies on simulated workers with the perfect-foresight oracle."""
    import_from_here()
    try:
        _check_belonging(context.params)
        if global_batch_size is not None:
            remedy = "The default is 64 a worker."
            least("simulate", "--global-batch-size", global_batch_size, 1, remedy)
        drawn = _drawn(
            scenario,
            speeds,
            noise=0.02 if noise is None else noise,
            intercepts=intercepts or "0",
            world_size=8 if world_size is None else world_size,
            num_steps=600 if steps is None else steps,
            num_seeds=4 if seeds is None else seeds,
            global_batch_size=global_batch_size,
        )
        cases = _cases(drawn, _recorded(trace or (), intercepts, global_batch_size))
        runs = _play(cases, policy)
    except ValueError as error:
        fail(str(error), 2)
    if as_json:
        typer.echo(json.dumps(_as_json(cases, runs), indent=2))
    else:
        typer.echo(_as_text(cases, runs, terminal_width()))


Played = dict[str, Any]
"""What one policy made of one case, as it stands in the JSON: times in seconds, shares of 1."""


def _play(cases: Sequence[Case], policy: str | None) -> list[Played]:
    """Return what every policy makes of every case, with a bar on stderr if that is a terminal."""
    chosen = without_settings() if policy is None else names("simulate", "--policy", policy)
    try:
        policies = [(name, by_name(name)) for name in chosen]
    except ValueError as error:
        raise ValueError(f"`evenstep simulate --policy`: {error}") from error
    console = Console(stderr=True)
    runs = []
    for case in track(
        cases, "evenstep", console=console, transient=True, disable=not console.is_terminal
    ):
        cluster, workload = case.given.cluster(case.global_batch_size), case.given.workload
        best_s = sim.oracle(cluster, workload)
        for name, each in policies:
            report = sim.run(each, cluster, workload)
            run = {
                "policy": name,
                "scenario": case.given.name,
                "seed": case.seed,
                "global_batch_size": case.global_batch_size,
                "regret": report.regret(best_s),
                "step_s": float(report.step_s.mean()),
                "best_step_s": float(best_s.mean()),
                "samples_per_s": report.samples_per_s,
                "idle_share": report.idle_share,
            }
            runs.append(run)
    return runs


def _standings(runs: Sequence[Played]) -> list[dict[str, Any]]:
    """Return means over the scenarios for each policy, however many seeds each has; best first."""
    found: dict[str, dict[str, list[Played]]] = {}
    for run in runs:
        found.setdefault(run["policy"], {}).setdefault(run["scenario"], []).append(run)

    def mean(name: str, some: Sequence[Played]) -> float:
        return fmean(run[name] for run in some)

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
        "runs": list(runs),
        "recorded_step_s": recorded,
    }


def _as_text(cases: Sequence[Case], runs: Sequence[Played], width: int | None) -> str:
    """Return the table for a terminal of ``width`` columns, or of any."""
    columns = list(dict.fromkeys(run["scenario"] for run in runs))
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
    head = f"Mean step time above the perfect-foresight oracle's, in %: {_heading(cases)}."
    notes = [paragraph(text, width) for text in _recorded_notes(cases, runs)]
    return "\n\n".join([paragraph(head, width), text_table(header, rows, width=width), *notes])


def _recorded_notes(cases: Sequence[Case], runs: Sequence[Played]) -> Iterator[str]:
    best_s = {run["scenario"]: run["best_step_s"] for run in runs}
    for case in cases:
        if case.recorded_s is not None:
            above = percent(case.recorded_s / best_s[case.given.name] - 1)
            yield (
                f"As recorded, a step of {case.given.name} took {number(case.recorded_s)} s in "
                f"the mean, {above} % above the oracle's."
            )
