"""The charts of a run, each with its figures for the script and its frame for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._render import counted, number, percent, seconds
from .._types import FloatArray
from ._chart_data import (
    Series,
    Spec,
    areas,
    chart,
    every,
    heat,
    highest,
    lines,
    lowest,
    table,
    wider,
)
from ._read_figures import LinkFigures, ReportFigures
from ._sentences import LABELS, rank_name
from ._step_tally import over

MOST_ROWS = 32
"""Ranks in a table; of more, the ones that matter most."""
_MOST_LINES = 8  # ranks with a line each: more cannot be distinguished


Charts = dict[str, Spec]
"""Figures of charts for the script, by the name of the chart, which is unique on the page.

Each function below adds those of its charts, and returns their frames for the page.
"""


def step_times(charts: Charts, run: ReportFigures, key: str) -> str:
    """Draw measured step times against those that are predicted."""
    steps = run.steps
    known = {
        "whole step": ("--c0", steps.wall_s),
        "computing of the slowest rank": ("--c1", steps.makespan_s),
        "equal split (predicted)": ("--c4", steps.equal_s),
        "best split (predicted)": ("--c2", steps.best_s),
    }
    return _over_steps(
        charts,
        run,
        f"{key}-step-time",
        "Step time, measured and predicted",
        "Means over the steps of a stretch; the band is the shortest and the longest of them. "
        "Predictions are of computing alone, by the fitted times of the workers.",
        {name: one for name, one in known.items() if not np.isnan(one[1]).all()},
        extent=(steps.least_s, steps.most_s),
    )


def account(charts: Charts, run: ReportFigures, key: str) -> str:
    """Draw where the time of a step goes; nothing without accounts."""
    if run.accounts is None:
        return ""
    columns = dict(zip(LABELS.values(), run.accounts.part_s.T, strict=True))
    colors = [f"--p-{part.removesuffix('_s')}" for part in LABELS]
    series = dict(zip(columns, zip(colors, columns.values(), strict=True), strict=True))
    return _drawn(
        charts,
        f"{key}-account",
        "Where the time of a step goes",
        "Seconds of a step on top of each other, means over ranks and over the steps of a "
        "stretch. Evaluations and checkpoints are spread over the steps around them.",
        areas(run, key, series),
        _over_time(run, "Seconds of a step, mean over ranks", columns),
    )


def waiting(charts: Charts, run: ReportFigures, key: str, high: float | None = None) -> str:
    """Draw the heat map of waiting.

    Args:
        charts: gets its figures.
        run: whose.
        key: of the run.
        high: share with the darkest color, to compare maps; None is the largest.
    """
    shares = 100 * waiting_shares(run)
    extent = (0.0, 100 * high if high else highest(shares))
    of = "its time" if run.accounts is not None else "the slowest rank's computing"
    return _drawn(
        charts,
        f"{key}-waiting",
        "Who waits",
        f"Part of {of} that each rank waits for others. A pale row among dark ones is the rank "
        "that the others wait for.",
        heat(run, key, shares, unit="%", extent=extent, colors="heat"),
        _by_rank(run, "Percent of its time that each rank waits", shares),
    )


def waiting_shares(run: ReportFigures) -> FloatArray:
    """Return the part of its time that each rank waits, by accounts where there are some."""
    return run.steps.idle_share if run.accounts is None else run.accounts.waiting_share


def of_ranks(charts: Charts, run: ReportFigures, key: str) -> str:
    """Draw local batch sizes and speeds."""
    sizes = _ranks(
        charts,
        run,
        f"{key}-sizes",
        "Local batch sizes",
        "Samples of a step that each rank computes, means over the steps of a stretch. Where plans "
        "changed seldom, ticks above say when.",
        run.steps.batch_size,
        unit="samples",
    )
    return sizes + _ranks(
        charts,
        run,
        f"{key}-speeds",
        "Speeds",
        "Samples of each rank by the seconds that it computed them in, its waiting left out.",
        run.steps.samples_per_s,
        unit="samples/s",
    )


def exchanges(charts: Charts, run: ReportFigures, links: LinkFigures, key: str) -> str:
    """Draw exchanges on unequal links; nothing if none was measured."""
    if np.isnan(links.exchange_s).all():
        return ""
    return _over_steps(
        charts,
        run,
        f"{key}-exchanges",
        "Exchanges of gradients, measured and predicted",
        "Means over the steps of a stretch; the band is the shortest and the longest of them.",
        {"measured": ("--c0", links.exchange_s), "predicted": ("--c2", links.predicted_s)},
        extent=(links.least_s, links.most_s),
    )


def overlaid(charts: Charts, runs: Mapping[str, ReportFigures]) -> str:
    """Draw both runs' step times in one chart."""
    first = max(runs.values(), key=lambda run: run.last_step - run.first_step)
    colors = ("--c0", "--c1")
    series = {}
    for color, (label, run) in zip(colors, runs.items(), strict=True):
        values = run.steps.makespan_s if np.isnan(run.steps.wall_s).all() else run.steps.wall_s
        series[label] = (color, _onto(first, run, values))
    words = "Means over stretches of steps, counted from the first step of each run."
    return _over_steps(
        charts, first, "both-step-time", "Step time of both runs", words, series, extent=None
    )


def _over_steps(
    charts: Charts,
    run: ReportFigures,
    name: str,
    title: str,
    words: str,
    series: Series,
    *,
    extent: tuple[FloatArray, FloatArray] | None,
) -> str:
    """Draw lines of seconds over the steps of a run, whose key begins the name of the chart."""
    columns = {label: values for label, (_, values) in series.items()}
    if extent is not None:
        columns |= {"shortest": extent[0], "longest": extent[1]}
    spec = lines(run, name.partition("-")[0], series, unit="s", extent=extent)
    return _drawn(charts, name, title, words, spec, _over_time(run, "In seconds", columns))


def _drawn(charts: Charts, name: str, title: str, words: str, spec: Spec, alternative: str) -> str:
    charts[name] = spec
    return chart(name, title, words, spec, alternative)


def _onto(target: ReportFigures, run: ReportFigures, values: FloatArray) -> FloatArray:
    """Return means of ``run`` over the stretches of ``target``, NaN past its end."""
    factor = max(1, target.width // run.width)  # widths are powers of two
    num = np.where(np.isnan(values), np.nan, run.steps.num)
    means = over(wider((num * values)[:, None], factor), wider(num[:, None], factor))[:, 0]
    at = (target.edges - target.first_step) // (run.width * factor)
    return np.where(at < len(means), means[np.minimum(at, len(means) - 1)], np.nan)


def _ranks(
    charts: Charts,
    run: ReportFigures,
    name: str,
    title: str,
    words: str,
    values: FloatArray,
    *,
    unit: str,
) -> str:
    """Draw a line for each of a few ranks, or a map of many; ``values`` has a column for each."""
    key = name.partition("-")[0]
    if run.world_size > _MOST_LINES:
        extent = (lowest(values), highest(values))
        spec = heat(run, key, values, unit=unit, extent=extent, colors="cool")
    else:
        each = {rank_name(run, at): (f"--c{at}", values[:, at]) for at in range(run.world_size)}
        spec = lines(run, key, each, unit=unit, stepped=True)
    spec["notes"] = _plan_notes(run, spec["width"])
    return _drawn(charts, name, title, words, spec, _by_rank(run, f"{title} ({unit})", values))


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
