"""The charts of a run, each with its figures for the script and its frame for the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._render import counted, number, percent, seconds
from .._types import FloatArray
from ._chart_data import Spec, areas, chart, every, heat, highest, lines, lowest, table, wider
from ._run_figures import PARTS, LinkFigures, ReportFigures
from ._sentences import LABELS, rank_name
from ._step_tally import over

MOST_ROWS = 32
"""Ranks in a table; of more, the ones that matter most."""
_MOST_LINES = 8  # ranks with a line each: more cannot be distinguished


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart.

    Attributes:
        name: unique on the page.
        html: its frame.
        spec: its figures.
    """

    name: str
    html: str
    spec: Spec


def step_times(run: ReportFigures, key: str) -> Drawn:
    """Return the chart of measured step times against those that are predicted."""
    steps = run.steps
    known = {
        "whole step": ("--c0", steps.wall_s),
        "computing of the slowest rank": ("--c1", steps.makespan_s),
        "equal split (predicted)": ("--c4", steps.equal_s),
        "best split (predicted)": ("--c2", steps.best_s),
    }
    series = {name: one for name, one in known.items() if not np.isnan(one[1]).all()}
    words = (
        "Means over the steps of a stretch; the band is the shortest and the longest of them. "
        "Predictions are of computing alone, by the fitted times of the workers."
    )
    name = f"{key}-step-time"
    spec = lines(run, key, series, unit="s", extent=(steps.least_s, steps.most_s))
    values = {label: values for label, (_, values) in series.items()}
    values |= {"shortest": steps.least_s, "longest": steps.most_s}
    html = chart(
        name,
        "Step time, measured and predicted",
        words,
        legend={label: color for label, (color, _) in series.items()},
        is_dashed=True,
        alternative=_over_time(run, "Seconds of a step", values),
    )
    return Drawn(name, html, spec)


def account(run: ReportFigures, key: str) -> Drawn | None:
    """Return the chart of where the time of a step goes; None without accounts."""
    if run.accounts is None:
        return None
    columns = {LABELS[part]: run.accounts.part_s[:, at] for at, part in enumerate(PARTS)}
    series = {
        label: (f"--p-{part.removesuffix('_s')}", columns[label]) for part, label in LABELS.items()
    }
    name = f"{key}-account"
    html = chart(
        name,
        "Where the time of a step goes",
        "Seconds of a step on top of each other, means over ranks and over the steps of a "
        "stretch. Evaluations and checkpoints are spread over the steps around them.",
        legend={label: color for label, (color, _) in series.items()},
        alternative=_over_time(run, "Seconds of a step, mean over ranks", columns),
    )
    return Drawn(name, html, areas(run, key, series))


def waiting(run: ReportFigures, key: str, high: float | None = None) -> Drawn:
    """Return the heat map of waiting.

    Args:
        run: whose.
        key: of the run.
        high: share with the darkest color, to compare maps; None is the largest.
    """
    shares = waiting_shares(run)
    extent = (0.0, 100 * (high or highest(shares)))
    of = "its time" if run.accounts is not None else "the slowest rank's computing"
    name = f"{key}-waiting"
    html = chart(
        name,
        "Who waits",
        f"Part of {of} that each rank waits for others. A pale row among dark ones is the rank "
        "that the others wait for.",
        legend={_scale(extent, "%"): "--heat"},
        alternative=_by_rank(run, "Percent of its time that each rank waits", 100 * shares),
    )
    spec = heat(run, key, 100 * shares, unit="%", extent=extent, colors="heat")
    return Drawn(name, html, spec)


def waiting_shares(run: ReportFigures) -> FloatArray:
    """Return the part of its time that each rank waits, by accounts where there are some."""
    return run.steps.idle_share if run.accounts is None else run.accounts.waiting_share


def of_ranks(run: ReportFigures, key: str) -> Iterator[Drawn]:
    """Yield the charts of local batch sizes and of speeds."""
    yield _ranks(
        run,
        key,
        ("sizes", "Local batch sizes"),
        "Samples of a step that each rank computes, means over the steps of a stretch. Where plans "
        "changed seldom, ticks above say when.",
        run.steps.batch_size,
        unit="samples",
    )
    yield _ranks(
        run,
        key,
        ("speeds", "Speeds"),
        "Samples of each rank by the seconds that it computed them in, its waiting left out.",
        run.steps.samples_per_s,
        unit="samples/s",
    )


def exchanges(run: ReportFigures, links: LinkFigures, key: str) -> Drawn | None:
    """Return the chart of exchanges on unequal links; None if none was measured."""
    if np.isnan(links.exchange_s).all():
        return None
    series = {
        "measured": ("--c0", links.exchange_s),
        "predicted": ("--c2", links.predicted_s),
    }
    name = f"{key}-exchanges"
    html = chart(
        name,
        "Exchanges of gradients, measured and predicted",
        "Means over the steps of a stretch; the band is the shortest and the longest of them.",
        legend={label: color for label, (color, _) in series.items()},
        is_dashed=True,
        alternative=_over_time(
            run, "Seconds of an exchange", {label: one for label, (_, one) in series.items()}
        ),
    )
    extent = (links.least_s, links.most_s)
    return Drawn(name, html, lines(run, key, series, unit="s", extent=extent))


def overlaid(runs: Mapping[str, ReportFigures]) -> Drawn | None:
    """Return both runs' step times in one chart; None where neither has any."""
    first = max(runs.values(), key=lambda run: run.last_step - run.first_step)
    colors = ("--c0", "--c1")
    series = {}
    for color, (label, run) in zip(colors, runs.items(), strict=True):
        values = run.steps.makespan_s if np.isnan(run.steps.wall_s).all() else run.steps.wall_s
        series[label] = (color, _onto(first, run, values))
    html = chart(
        "both-step-time",
        "Step time of both runs",
        "Means over stretches of steps, counted from the first step of each run.",
        legend={label: color for label, (color, _) in series.items()},
        is_dashed=True,
        alternative=_over_time(
            first, "Seconds of a step", {label: one for label, (_, one) in series.items()}
        ),
    )
    return Drawn("both-step-time", html, lines(first, "both", series, unit="s"))


def _onto(target: ReportFigures, run: ReportFigures, values: FloatArray) -> FloatArray:
    """Return means of ``run`` over the stretches of ``target``, NaN past its end."""
    factor = max(1, target.width // run.width)  # widths are powers of two
    num = np.where(np.isnan(values), np.nan, run.steps.num)
    means = over(wider((num * values)[:, None], factor), wider(num[:, None], factor))[:, 0]
    at = (target.edges - target.first_step) // (run.width * factor)
    return np.where(at < len(means), means[np.minimum(at, len(means) - 1)], np.nan)


def _ranks(
    run: ReportFigures,
    key: str,
    names: tuple[str, str],
    words: str,
    values: FloatArray,
    *,
    unit: str,
) -> Drawn:
    """Return a line for each of a few ranks, or a map of many.

    Args:
        run, key: whose.
        names: short, and as the title.
        words: below the title.
        values: ``(stretches, world_size)``.
        unit: of them.
    """
    name, title = f"{key}-{names[0]}", names[1]
    tables = _by_rank(run, f"{title} ({unit})", values)
    if run.world_size > _MOST_LINES:
        extent = (lowest(values), highest(values))
        legend = {_scale(extent, unit): "--cool"}
        html = chart(name, title, words, legend=legend, alternative=tables)
        spec = heat(run, key, values, unit=unit, extent=extent, colors="cool")
        return Drawn(name, html, spec | {"notes": _plan_notes(run, spec["width"])})
    series = {
        rank_name(run, rank): (f"--c{rank}", values[:, rank]) for rank in range(run.world_size)
    }
    legend = {label: color for label, (color, _) in series.items()}
    html = chart(name, title, words, legend=legend, alternative=tables, is_dashed=True)
    spec = lines(run, key, series, unit=unit, stepped=True)
    return Drawn(name, html, spec | {"notes": _plan_notes(run, spec["width"])})


def _scale(extent: tuple[float, float], unit: str) -> str:
    low, high = (number(value) for value in extent)
    return f"{low} to {high} {unit}; gray where nothing is known"


def _plan_notes(run: ReportFigures, width: int) -> dict[int, str]:
    """Return what is to be said of the plans, by stretches of ``width`` steps."""
    reasons = {
        (change.event.step - run.first_step) // width: change.event.reason for change in run.changes
    }
    nums: dict[int, int] = {}
    for at, num in enumerate(run.changes_by_stretch.tolist()):
        if num:
            nums[at * run.width // width] = nums.get(at * run.width // width, 0) + num
    return {
        at: counted(num, "new plan") + (f" ({reasons[at]})" if at in reasons else "")
        for at, num in nums.items()
    }


def _over_time(run: ReportFigures, caption: str, columns: Mapping[str, FloatArray]) -> str:
    """Return a table over the steps: some stretches of many, at equal distances."""
    shown = every(run)
    if len(shown) < len(run.edges):
        caption += f"; {len(shown)} of {len(run.edges)} stretches, at equal distances"
    names = [name for name, values in columns.items() if np.nan_to_num(values).any()]
    rows = []
    for at in shown:
        start = int(run.edges[at])
        cells = [_cell(columns[name][at], seconds) for name in names]
        until = f" to {start + run.width - 1:,}" if run.width > 1 else ""
        rows.append([f"{start:,}{until}", *cells])
    return table(caption, ["Steps", *names], rows)


def _by_rank(run: ReportFigures, caption: str, values: FloatArray) -> str:
    """Return a table by rank: its mean, least and most over the stretches."""
    with np.errstate(invalid="ignore"):
        known = ~np.isnan(values)
        num = np.maximum(known.sum(axis=0), 1)
        means = np.where(known.any(axis=0), np.nansum(values, axis=0) / num, np.nan)
    least = np.where(known, values, np.inf).min(axis=0)
    most = np.where(known, values, -np.inf).max(axis=0)
    order = np.arange(run.world_size)
    if run.world_size > MOST_ROWS:
        order = np.sort(np.argsort(-np.nan_to_num(most - least), kind="stable")[:MOST_ROWS])
        caption += f"; the {MOST_ROWS} of {run.world_size} ranks that changed most"
    rows = [
        [rank_name(run, rank), *(_cell(one[rank], number) for one in (means, least, most))]
        for rank in order.tolist()
    ]
    return table(caption, ["Rank", "mean", "least", "most"], rows)


def _cell(value: Any, words: Any) -> str:
    return words(float(value)) if np.isfinite(value) else "unknown"


def share_cell(value: float) -> str:
    """Return a share as it stands in a table."""
    return f"{percent(value)} %"
