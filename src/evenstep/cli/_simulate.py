"""``evenstep simulate``: policies on workers that are drawn or recorded, against the best plan."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, TypeVar

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
from ..sim._read_trace import read_rows
from ..sim._scenarios import scenario_names
from ._common import fail, import_from_here, least, names, numbers, refused, spread, within

Asked = TypeVar("Asked")

_MOST_TIMES = 10**8  # of all workers in all steps: a gigabyte
_MOST_SEEDS = 10_000


@dataclass(frozen=True, slots=True)
class WorkersAsked:
    """Options that say which workers there are; None where they were left out.

    Attributes:
        scenario: names of scenarios, commas between.
        speeds: samples per second of each worker, likewise.
        noise: standard deviation of a step's time as a share of it, with speeds.
        traces: recordings.
        intercepts: fixed seconds of a step, with speeds or traces.
        world_size: workers of scenarios.
        steps: of what is drawn.
        seeds: their number, from 0.
        global_batch_size: samples per step.
    """

    scenario: str | None = None
    speeds: str | None = None
    noise: float | None = None
    traces: Sequence[Path] = ()
    intercepts: str | None = None
    world_size: int | None = None
    steps: int | None = None
    seeds: int | None = None
    global_batch_size: int | None = None


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


def cases_of(asked: WorkersAsked) -> list[Case]:
    """Return the workers that are asked for, drawn ones once for each seed.

    Raises:
        ValueError: something cannot be honoured; the message names the option.
    """
    _check_belonging(asked)
    if asked.global_batch_size is not None:
        remedy = "The default is 64 a worker."
        least("simulate", "--global-batch-size", asked.global_batch_size, 1, remedy)
    cases = [*_drawn(asked), *_recorded(asked)]
    for case in cases:
        try:
            case.given.cluster(case.global_batch_size)
        except ValueError as error:
            rule, got = f"suit the workers of {case.given.name!r}", case.global_batch_size
            raise refused("simulate", "--global-batch-size", rule, got, str(error)) from error
    return cases


def heading(cases: Sequence[Case]) -> str:
    """Return what the columns are: workers, samples, steps, seeds."""
    seeds = sorted({case.seed for case in cases if case.seed is not None})
    several = (
        f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {min(seeds, default=0)}"
    )
    return "; ".join(dict.fromkeys(_setting(case, several) for case in cases))


def _setting(case: Case, seeds: str) -> str:
    given, total = case.given, f"{case.global_batch_size} samples a step"
    if case.seed is None:
        return f"{given.name} at {total}"
    return f"{given.world_size} workers, {total}, {given.num_steps} steps, {seeds}"


def progress(asked: Sequence[Asked]) -> Iterable[Asked]:
    """Yield what is asked one by one, with a bar on stderr if that is a terminal."""
    console = Console(stderr=True)
    return track(
        asked, "evenstep", console=console, transient=True, disable=not console.is_terminal
    )


def _check_belonging(asked: WorkersAsked) -> None:
    """Raise for options that nothing would heed, and where no workers are named."""
    ways = {"--scenario": asked.scenario, "--speeds": asked.speeds, "--trace": asked.traces}
    if not any(ways.values()):
        remedy = "`evenstep simulate --scenario burst` is an example."
        raise invalid("evenstep simulate", f"name workers by {' or '.join(ways)}", "none", remedy)
    for option, value, needed in (
        ("--world-size", asked.world_size, ("--scenario",)),
        ("--noise", asked.noise, ("--speeds",)),
        ("--intercepts", asked.intercepts, ("--speeds", "--trace")),
        ("--steps", asked.steps, ("--scenario", "--speeds")),
        ("--seeds", asked.seeds, ("--scenario", "--speeds")),
    ):
        if value is not None and not any(ways[way] for way in needed):
            remedy = "Other workers have their own; leave it out."
            raise refused("simulate", option, f"come with {' or '.join(needed)}", value, remedy)


def _drawn(asked: WorkersAsked) -> Iterator[Case]:
    """Yield workers by name, then those of given speeds."""
    speeds = () if asked.speeds is None else numbers("simulate", "--speeds", asked.speeds)
    known = () if asked.scenario is None else names("simulate", "--scenario", asked.scenario)
    world_size = 8 if asked.world_size is None else asked.world_size
    num_steps = 600 if asked.steps is None else asked.steps
    within("simulate", "--world-size", world_size, 1, 100_000, "The default is 8.")
    most = _MOST_TIMES // max(world_size, len(speeds))
    within("simulate", "--steps", num_steps, 1, most, "The default is 600.")
    num_seeds = 4 if asked.seeds is None else asked.seeds
    within("simulate", "--seeds", num_seeds, 1, _MOST_SEEDS, "The default is 4.")
    for name in known:
        if name not in scenario_names():
            rule = f"hold some of {', '.join(scenario_names())}"
            remedy = "A recorded one is given with --trace."
            raise refused("simulate", "--scenario", rule, repr(name), remedy)
        for seed in range(num_seeds):
            given = sim.scenario(name, world_size, num_steps, seed)
            yield Case(given, asked.global_batch_size or 64 * world_size, seed)
    if speeds:
        for seed in range(num_seeds):
            given = _of_speeds(asked, np.array(speeds), num_steps, seed)
            yield Case(given, asked.global_batch_size or 64 * len(speeds), seed)


def _of_speeds(asked: WorkersAsked, speeds: FloatArray, num_steps: int, seed: int) -> Scenario:
    """Return workers of these samples per second, whose steps differ by luck."""
    noise = 0.02 if asked.noise is None else asked.noise
    within("simulate", "--noise", noise, 0, 1, "The default is 0.02.")
    fixed_s = _fixed_s(asked.intercepts or "0", len(speeds), like="--speeds")
    slope_s = np.tile(1 / speeds, (num_steps, 1))
    draw = np.random.default_rng(seed)
    return Scenario("speeds", fixed_s, slope_s, np.exp(noise * draw.standard_normal(slope_s.shape)))


def _fixed_s(text: str, num_workers: int, *, like: str) -> FloatArray:
    found = numbers("simulate", "--intercepts", text, positive=False)
    return np.array(spread("simulate", "--intercepts", found, num_workers, like=like))


def _recorded(asked: WorkersAsked) -> Iterator[Case]:
    """Yield the workers of recordings, with the global batch that most of their steps had."""
    seen: set[str] = set()
    for file in asked.traces:
        try:
            given = sim.read_trace(file)
            if asked.intercepts is not None:
                fixed_s = _fixed_s(asked.intercepts, given.world_size, like=file.name)
                given = sim.read_trace(file, intercept_s=fixed_s)
            total, step_s = _recorded_steps(file)
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
        own = asked.global_batch_size in (None, total)
        yield Case(given, asked.global_batch_size or total, None, step_s if own else None)


def _recorded_steps(trace: Path) -> tuple[int, float | None]:
    """Return the samples of most steps, and the mean seconds of one if all have as many."""
    samples: Counter[int] = Counter()
    slowest_s: defaultdict[int, float] = defaultdict(float)
    for row in read_rows(trace):
        samples[row.step] += row.samples
        slowest_s[row.step] = max(slowest_s[row.step], row.seconds)
    totals = Counter(samples.values())
    step_s = fmean(slowest_s.values()) if len(totals) == 1 else None
    return totals.most_common(1)[0][0], step_s


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
        cases = cases_of(asked)
        runs = _play(cases, policy)
    except ValueError as error:
        fail(str(error), 2)
    if as_json:
        typer.echo(json.dumps(_as_json(cases, runs), indent=2))
    else:
        typer.echo(_as_text(cases, runs, terminal_width()))


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
