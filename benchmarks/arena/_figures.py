"""What the files of a set-up say: seconds per step in pairs, seconds to the target, the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.arena._papers import SETUPS
from benchmarks.arena._setups import ArenaSetUp
from benchmarks.narx import gain

ROUNDED_S = 0.002
"""More than the times of a turn and of its last update are rounded by, and less than a step."""
Found = Mapping[str, Any]
"""A cell as its file has it."""


@dataclass(frozen=True, slots=True)
class Paired:
    """How many times as long as another contestant's steps one's are, in the same turns.

    Attributes:
        ratio: geometric mean over turns.
        low: end of its 95 % interval, by Student's t over the logarithms.
        high: the other end.
    """

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over seeds and its standard deviation; ``values`` are those of the seeds.

    A seed that did not come there has None, and then there is no mean.
    """

    values: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        """Over all seeds."""
        known = [value for value in self.values if value is not None]
        return fmean(known) if len(known) == len(self.values) else None

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds; None for one seed."""
        known = [value for value in self.values if value is not None]
        return stdev(known) if len(known) == len(self.values) and len(known) > 1 else None


@dataclass(frozen=True, slots=True)
class Standing:
    """One contestant on one set-up.

    Attributes:
        name: of the contestant.
        is_exact: whether its updates are those of plain training.
        step_s: seconds per global batch of samples, the first steps included; a mean over seeds.
        settled: its steps beside those of ``auto`` after the turns of learning; None where inexact.
        to_target_s: seconds until the target accuracy, by seed.
        accuracy: at the end of the time, by seed.
        cpu_share: most CPU time of a worker over what its device took. An emulation holds where
            it is at most a fifth.
        late_ms: 95th percentile by which sleeps ended late, of the worst worker.
    """

    name: str
    is_exact: bool
    step_s: Spread
    settled: Paired | None
    to_target_s: Spread
    accuracy: Spread
    cpu_share: float
    late_ms: float


def standings(cells: Sequence[Found]) -> list[Standing]:
    """Return all contestants of a set-up from its cells, that of the exact ones first."""
    exact, *others = cells
    return [*_exact_standings(exact), *(_inexact_standing(cell) for cell in others)]


def bound_of(cell: Found) -> float:
    """Return how many times as fast as plain DDP a planner that knows the speeds is, by curves."""
    setup, duration_s = SETUPS[cell["cell"]["setup"]], cell["cell"]["duration_s"]
    return setup.mean_step_s(duration_s, equal=True) / setup.mean_step_s(duration_s, equal=False)


def readings_gain(setup: ArenaSetUp) -> float:
    """Return what readings add to the R^2 of forecasts by past speeds, under equal sizes.

    It is known from curves, trace and readers alone, before anything races.
    """
    now_s, alone_s = 0.0, setup.times.seconds(setup.equal)
    speeds, shares = [], []
    while now_s < setup.duration_s:
        ends_s = [setup.trace.end_s(k, now_s, alone) for k, alone in enumerate(alone_s)]
        took_s = np.array(ends_s) - now_s
        speeds.append(setup.equal / took_s)
        told = [1 / setup.trace.at(end_s)[k] for k, end_s in enumerate(ends_s)]
        shares.append(np.array(told) if setup.tells_quota else alone_s / took_s)
        now_s = max(ends_s) + setup.exchange_s
    return gain(np.array(speeds), np.array(shares))


def paired(ours: Found, theirs: Found, *, skip: int = 1) -> Paired | None:
    """Return how long ``theirs`` steps take, over ``ours``; None of fewer than two turns.

    Args:
        ours: an entry of a cell.
        theirs: another one of the same cell.
        skip: turns at the beginning that are left out.
    """
    from scipy.stats import t

    logs = np.log(_steps_s(theirs) / _steps_s(ours))[skip:]
    if len(logs) < 2:
        return None
    margin = float(t.ppf(0.975, len(logs) - 1)) * logs.std(ddof=1) / np.sqrt(len(logs))
    low, middle, high = np.exp([logs.mean() - margin, logs.mean(), logs.mean() + margin])
    return Paired(float(middle), float(low), float(high))


def _steps_s(entry: Found) -> NDArray[np.float64]:
    """Return the mean step of each turn, by the updates within it."""
    took_s = np.array([turn["seconds"] for turn in entry["turns"]])
    ends_s = np.cumsum(took_s) + ROUNDED_S
    num_steps = np.diff(np.searchsorted(entry["updates_s"], ends_s, side="right"), prepend=0)
    found: NDArray[np.float64] = took_s / num_steps
    return found


def _exact_standings(cell: Found) -> list[Standing]:
    """Return the exact contestants; what a step does to accuracy is known from one process."""
    setup = SETUPS[cell["cell"]["setup"]]
    target, total = setup.target, setup.global_batch_size
    (auto,) = (one for one in cell["entries"] if one["name"] == "auto")
    found = []
    for one in cell["entries"]:
        updates_s, courses = one["updates_s"], cell["one_process"].values()
        reached = [_first(course[: len(updates_s)], target) for course in courses]
        found.append(
            Standing(
                name=one["name"],
                is_exact=True,
                step_s=Spread((_per_batch(one, total),)),
                settled=paired(auto, one, skip=setup.num_learning),
                to_target_s=Spread(
                    tuple(None if step is None else updates_s[step] for step in reached)
                ),
                accuracy=Spread(tuple(course[len(updates_s) - 1] for course in courses)),
                cpu_share=_cpu_share([one]),
                late_ms=_late_ms([one]),
            )
        )
    return found


def _inexact_standing(cell: Found) -> Standing:
    target, entries = _target(cell), cell["entries"]
    total = SETUPS[cell["cell"]["setup"]].global_batch_size
    reached = [_first([right for _, right in one["accuracy"]], target) for one in entries]
    return Standing(
        name=cell["cell"]["name"],
        is_exact=False,
        step_s=Spread(tuple(_per_batch(one, total) for one in entries)),
        settled=None,
        to_target_s=Spread(
            tuple(
                None if at is None else one["accuracy"][at][0]
                for at, one in zip(reached, entries, strict=True)
            )
        ),
        accuracy=Spread(tuple(one["accuracy"][-1][1] for one in entries)),
        cpu_share=_cpu_share(entries),
        late_ms=_late_ms(entries),
    )


def _target(cell: Found) -> float:
    return SETUPS[cell["cell"]["setup"]].target


def _first(course: Sequence[float], target: float) -> int | None:
    """Return where a course of accuracies is at the target first; None if it never is."""
    return next((at for at, right in enumerate(course) if right >= target), None)


def _per_batch(entry: Found, total: int) -> float:
    """Return seconds per global batch of samples until the last update."""
    return float(entry["updates_s"][-1] / (entry["num_samples"] / total))


def _cpu_share(entries: Sequence[Found]) -> float:
    return max(
        cpu_s / slept_s
        for one in entries
        for cpu_s, slept_s in zip(one["cpu_s"], one["slept_s"], strict=True)
        if slept_s
    )


def _late_ms(entries: Sequence[Found]) -> float:
    return float(max(late[1] for one in entries for late in one["late_ms"]))
