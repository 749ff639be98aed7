"""What ``evenstep simulate`` is asked to compare, checked before anything runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from .. import sim
from ..policies import by_name
from ..policies._by_name import without_settings
from ..sim._scenarios import scenario_names
from ._common import least, names, numbers, refused, spread, within
from ._trials import Case, Task, recorded_steps, scheme_by_name

_MOST_TIMES = 10**8  # of all workers in all steps: a gigabyte
_MOST_SEEDS = 10_000

EIGHT = scenario_names()[:8]
"""What policies are compared on."""


@dataclass(frozen=True, slots=True)
class Contest:
    """What is compared, ready to run.

    Attributes:
        cases: scenarios with seeds, and traces.
        policies: names, or ``"module:Class"``.
        schemes: likewise.
        move_cost: a claim's share of the best plan's mean step.
        jobs: processes; None is up to the machine.
        command: the options that were given, as one would type them.
    """

    cases: tuple[Case, ...]
    policies: tuple[str, ...]
    schemes: tuple[str, ...]
    move_cost: float
    jobs: int | None
    command: str

    @property
    def tasks(self) -> list[Task]:
        """Every policy under every scheme in every case."""
        return list(product(self.cases, self.policies, self.schemes, [self.move_cost]))


def contest_of(
    *,
    scenario: str | None,
    policy: str | None,
    scheme: str,
    traces: Sequence[Path],
    intercepts: str | None,
    world_size: int | None,
    steps: int | None,
    seeds: str | None,
    global_batch_size: int | None,
    move_cost: float,
    jobs: int | None,
) -> Contest:
    """Return what the options ask for, with the gaps filled.

    Raises:
        ValueError: something cannot be honoured; the message names the option.
    """
    drawn = {"--world-size": world_size, "--steps": steps, "--seeds": seeds}
    _check_belonging(drawn, scenario, traces, intercepts)
    check_jobs(jobs)
    _check_move_cost(move_cost)
    chosen = without_settings() if policy is None else names("simulate", "--policy", policy)
    schemes = names("simulate", "--scheme", scheme)
    for name in chosen:
        _in_words("--policy", by_name, name)
    for name in schemes:
        _in_words("--scheme", scheme_by_name, name)
    cases = _recorded(traces, intercepts, global_batch_size)
    if scenario is not None or not traces:
        asked = EIGHT if scenario is None else names("simulate", "--scenario", scenario)
        cases = [*drawn_cases(asked, world_size, steps, seeds, global_batch_size), *cases]
    told: dict[str, object] = {"--scenario": scenario, "--policy": policy, **drawn}
    told |= {"--global-batch-size": global_batch_size, "--intercepts": intercepts}
    told["--scheme"] = None if schemes == ("bsp",) else scheme
    told["--move-cost"] = None if move_cost == 0.01 else move_cost
    words = [f"{option} {value}" for option, value in told.items() if value is not None]
    words += [f"--trace {file}" for file in traces]
    command = " ".join(["evenstep simulate", *words])
    return Contest(tuple(cases), chosen, schemes, move_cost, jobs, command)


def drawn_cases(
    asked: Sequence[str],
    world_size: int | None,
    steps: int | None,
    seeds: str | None,
    global_batch_size: int | None,
) -> list[Case]:
    """Return scenarios by name with all seeds, checked; None is the default.

    Raises:
        ValueError: something cannot be honoured; the message names the option.
    """
    num_workers = 8 if world_size is None else world_size
    num_steps = 600 if steps is None else steps
    within("simulate", "--world-size", num_workers, 1, 100_000, "The default is 8.")
    most = _MOST_TIMES // num_workers
    within("simulate", "--steps", num_steps, 1, most, "The default is 600.")
    _check_total(global_batch_size)
    unknown = [name for name in asked if name not in scenario_names()]
    if unknown:
        rule = f"hold some of {', '.join(scenario_names())}"
        remedy = "A recorded one is given with --trace."
        raise refused("simulate", "--scenario", rule, repr(unknown[0]), remedy)
    total = 64 * num_workers if global_batch_size is None else global_batch_size
    cases = [
        Case(name, total, world_size=num_workers, num_steps=num_steps, seed=seed)
        for name in asked
        for seed in _seeds(seeds)
    ]
    for case in cases:
        _check_room(case)
    return cases


def _recorded(
    traces: Sequence[Path], intercepts: str | None, global_batch_size: int | None
) -> list[Case]:
    _check_total(global_batch_size)
    fixed = None
    if intercepts is not None:
        fixed = numbers("simulate", "--intercepts", intercepts, positive=False)
    cases = []
    for file in traces:
        try:
            given = sim.read_trace(file)
            each = fixed
            if fixed is not None:
                each = spread("simulate", "--intercepts", fixed, given.world_size, like=file.name)
            total, step_s = recorded_steps(file)
            if global_batch_size not in (None, total):
                total, step_s = global_batch_size, None
            cases.append(Case(given.name, total, file, each, recorded_s=step_s))
            cases[-1].given()
        except OSError as error:
            remedy = "Give a .csv or a .jsonl file, or the folder of a run."
            rule = "name a file that can be read"
            raise refused("simulate", "--trace", rule, f"{file} ({error})", remedy) from error
        except ValueError as error:
            raise ValueError(f"`evenstep simulate --trace {file}`: {error}") from error
        _check_room(cases[-1])
    if len({case.name for case in cases}) < len(cases):
        remedy = "Rename one: they stand under these in the table."
        got = ", ".join(map(str, traces))
        raise refused("simulate", "--trace", "name files of different names", got, remedy)
    return cases


def _seeds(text: str | None) -> range:
    found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", "0-3" if text is None else text)
    if found is not None:
        first, last = int(found[1]), found[2]
        seeds = range(first) if last is None else range(first, int(last) + 1)
        if 1 <= len(seeds) <= _MOST_SEEDS:
            return seeds
    rule = f"be a number from 1 to {_MOST_SEEDS:,}, or a range of as many"
    remedy = "4 is the seeds 0 to 3, 1000-1007 are eight."
    raise refused("simulate", "--seeds", rule, repr(text), remedy)


def _check_room(case: Case) -> None:
    """Raise unless the workers of every step can hold the global batch."""
    given = case.given()
    try:
        given.cluster(case.global_batch_size)
    except ValueError as error:
        rule = f"suit the workers of {case.name!r}"
        got = case.global_batch_size
        raise refused("simulate", "--global-batch-size", rule, got, str(error)) from error


def _check_belonging(
    drawn: dict[str, int | str | None],
    scenario: str | None,
    traces: Sequence[Path],
    intercepts: str | None,
) -> None:
    """Raise for an option that nothing would heed."""
    if intercepts is not None and not traces:
        remedy = "Scenarios have their own."
        raise refused("simulate", "--intercepts", "come with --trace", intercepts, remedy)
    for option, value in drawn.items():
        if value is not None and traces and scenario is None:
            remedy = "A trace has its own; leave it out."
            rule = "come with --scenario where there is a --trace"
            raise refused("simulate", option, rule, value, remedy)


def check_jobs(jobs: int | None) -> None:
    """Raise for a number of processes that cannot be."""
    if jobs is not None:
        least("simulate", "--jobs", jobs, 1, "1 runs all in this process.")


def _check_total(global_batch_size: int | None) -> None:
    if global_batch_size is not None:
        remedy = "The default is 64 a worker."
        least("simulate", "--global-batch-size", global_batch_size, 1, remedy)


def _check_move_cost(move_cost: float) -> None:
    if not (math.isfinite(move_cost) and move_cost >= 0):
        remedy = "0.01 is a hundredth of a step."
        raise refused("simulate", "--move-cost", "be at least 0", move_cost, remedy)


def _in_words(option: str, find: Callable[[str], object], name: str) -> None:
    """Raise, in the name of the option, unless ``find`` knows the name."""
    try:
        find(name)
    except ValueError as error:
        raise ValueError(f"`evenstep simulate {option}`: {error}") from error
