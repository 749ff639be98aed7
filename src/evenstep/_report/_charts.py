"""Pieces of HTML, and charts: each with its figures for the script and its frame for the page."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from .._render import counted, number, seconds
from .._types import FloatArray
from ._read_figures import LinkFigures, ReportFigures
from ._sentences import LABELS, rank_name
from ._step_tally import over

Cells = Sequence[str]
DASHES = ((), (8, 4), (2, 3), (10, 3, 2, 3))
"""Of lines, so that they can be distinguished without their colors."""


def text(tag: str, words: str, *, kind: str = "") -> str:
    """Return words in a tag, with a class where one is given."""
    return f"<{tag}{f' class={kind}' if kind else ''}>{escape(words)}</{tag}>"


def table(caption: str, header: Cells, rows: Iterable[Cells], *, left: int = 1) -> str:
    """Return a table that scrolls on its own where it is wider than the screen.

    Args:
        caption: what it holds; says so as well if rows are left out.
        header: names of the columns.
        rows: their cells.
        left: columns of words; the others are numbers. One more may be words, as the last.
    """
    kinds = ['"w"' if at < left else "n" for at in range(len(header))]
    head = "".join(
        f"<th scope=col class={kind}>{escape(cell)}</th>"
        for cell, kind in zip(header, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + f"<th scope=row>{escape(row[0])}</th>"
        + "".join(
            f"<td class={kind}>{escape(cell)}</td>"
            for cell, kind in zip(row[1:], kinds[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class=scroll role=region tabindex=0 aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, html: str) -> str:
    """Return what is shown when it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>"


def key_figures(figures: Mapping[str, str]) -> str:
    """Return a few figures in large print."""
    pairs = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in figures.items()
    )
    return f"<dl class=figures>{''.join(pairs)}</dl>"


Spec = dict[str, Any]
"""What the script draws a chart from."""
Series = Mapping[str, tuple[str, FloatArray]]
"""By label, the name of its color and a value for each stretch."""


def chart(name: str, title: str, words: str, spec: Spec, alternative: str) -> str:
    """Return the frame of a chart, which the script fills, and its figures as a table.

    Args:
        name: under which the script finds the figures.
        title, words: above it: what it shows, and what to look for.
        spec: what is drawn.
        alternative: tables, for whom the picture is of no use.
    """
    return (
        f'<figure aria-labelledby="{name}-title"><figcaption><strong id="{name}-title">'
        f"{escape(title)}</strong><p>{escape(words)}</p></figcaption>"
        f"<ul class=legend>{_legend(spec)}</ul>"
        f'<div class=plot data-chart="{name}" role=img '
        f'aria-label="{escape(f"Chart: {title}. {words} The table below it has the figures.")}">'
        "</div><div class=read>"
        f'<label for="{name}-at">Read at</label>'
        f'<input type=range id="{name}-at" min=0 max=1 value=0 aria-label="{escape(title)}: step">'
        f'<output for="{name}-at"></output>'
        f"<label class=peaks hidden><input type=checkbox> Show the highest peaks</label></div>"
        f"{folded('Figures of this chart as a table', alternative)}</figure>"
    )


def _legend(spec: Spec) -> str:
    """Return an entry for each color; a heat map has a scale."""
    if spec["kind"] == "heat":
        scale = f"{number(spec['low'])} to {number(spec['high'])} {spec['unit']}"
        swatch = f"<span class=scale data-colors={spec['colors']}></span>"
        return f"<li>{swatch} {escape(scale)}; gray where nothing is known</li>"
    named = [one for one in spec["series"] if "label" in one]
    return "".join(f"<li>{_swatch(one)}{escape(one['label'])}</li>" for one in named)


def _swatch(series: Spec) -> str:
    color = f"var({series['color']})"
    if "dash" not in series:
        return f'<span class=swatch style="background:{color}"></span>'
    dash = " ".join(map(str, series["dash"]))
    look = f'stroke="{color}" stroke-width=3 stroke-dasharray="{dash}"'
    line = f"<line x1=0 y1=5 x2=30 y2=5 {look} />"
    return f"<svg width=30 height=10 aria-hidden=true>{line}</svg> "


_MOST_STEPS = 20  # or stretches in a table
_MOST_CELLS = 1 << 17  # of a heat map: 350 kB of text
_NONE = 65535


def lines(
    run: ReportFigures,
    key: str,
    series: Series,
    *,
    unit: str,
    extent: tuple[FloatArray, FloatArray] | None = None,
    stepped: bool = False,
) -> Spec:
    """Return a chart of lines over the steps.

    Args:
        run: whose.
        key: of the run: charts of one have the same cursor.
        series: what is drawn.
        unit: of all values.
        extent: the least and the most of the first line, drawn as a band.
        stepped: whether a value holds until the next.
    """
    found: list[Spec] = [
        {
            "label": label,
            "color": color,
            "values": rounded(values),
            "stepped": stepped,
            "dash": DASHES[at % len(DASHES)],
        }
        for at, (label, (color, values)) in enumerate(series.items())
    ]
    if extent is not None:
        roles = zip(("least", "most"), extent, strict=True)
        found += [{"role": role, "values": rounded(values)} for role, values in roles]
    spec = {"kind": "lines", "unit": unit, "series": found}
    return (
        _on_steps(run, key)
        | spec
        | _focus([values for _, values in series.values()], () if extent is None else extent)
    )


def areas(run: ReportFigures, key: str, series: Series) -> Spec:
    """Return a chart of seconds on top of each other."""
    found = [
        {"label": label, "color": color, "values": rounded(values)}
        for label, (color, values) in series.items()
    ]
    spec = {"kind": "areas", "unit": "s", "series": found}
    total = np.sum([np.nan_to_num(values) for _, values in series.values()], axis=0)
    return _on_steps(run, key) | spec | _focus([total])


def _focus(series: Sequence[FloatArray], extent: Sequence[FloatArray] = ()) -> Spec:
    """Return where the axis ends at first: a few peaks would press all else to the bottom."""
    known = np.concatenate([values[~np.isnan(values)] for values in series])
    if not len(known):
        return {}
    usual = 1.5 * float(np.quantile(known, 0.97))
    has_peaks = 0 < usual < highest(*series, *extent) / 1.2
    return {"focus": rounded(np.array([usual]))[0]} if has_peaks else {}


def heat(
    run: ReportFigures,
    key: str,
    values: FloatArray,
    *,
    unit: str,
    extent: tuple[float, float],
    colors: str,
) -> Spec:
    """Return a heat map of ranks and time, as fine as its cells are not too many.

    Args:
        run: whose.
        key: of the run.
        values: ``(stretches, world_size)``, NaN where nothing is known.
        unit: of them.
        extent: values with the first color and with the last.
        colors: ``"heat"`` or ``"cool"``.
    """
    factor = math.ceil(values.size / _MOST_CELLS)
    values = wider(values, factor)
    low, high = extent
    with np.errstate(invalid="ignore"):
        cells = np.clip((values.T - low) / ((high - low) or 1.0), 0, 1) * (_NONE - 1)
    cells = np.where(np.isnan(cells), _NONE, np.rint(np.nan_to_num(cells))).astype("<u2")
    hosts = run.start.hosts if run.start else ()
    return {
        "kind": "heat",
        "run": key,
        "unit": unit,
        "colors": colors,
        "x": run.edges[::factor].tolist(),
        "width": run.width * factor,
        "rows": [hosts[rank] if rank < len(hosts) else "" for rank in range(run.world_size)],
        "low": low,
        "high": high,
        "values": base64.b64encode(cells.tobytes()).decode(),
    }


def wider(values: FloatArray, factor: int) -> FloatArray:
    """Return means over ``factor`` stretches each, without those that are NaN."""
    if factor <= 1:
        return values
    missing = -len(values) % factor
    padded = np.pad(values, ((0, missing), (0, 0)), constant_values=np.nan)
    groups = padded.reshape(-1, factor, values.shape[1])
    return over(np.nansum(groups, axis=1), (~np.isnan(groups)).sum(axis=1).astype(np.float64))


def highest(*tables: FloatArray) -> float:
    """Return the largest of the values that are known; 1 where that is 0, or none is."""
    return max(float(np.fmax.reduce(one, axis=None, initial=0.0)) for one in tables) or 1.0


def lowest(values: FloatArray) -> float:
    """Return the smallest of the values that are known; 0 where none is."""
    least = float(np.fmin.reduce(values, axis=None))
    return 0.0 if math.isnan(least) else least


def rounded(values: FloatArray) -> list[float | None]:
    """Return values with four digits, None for NaN."""
    return [None if math.isnan(value) else float(f"{value:.4g}") for value in values.tolist()]


def as_script(charts: Mapping[str, Spec]) -> str:
    """Return the charts as JSON that cannot end the element around it."""
    text = json.dumps(charts, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _on_steps(run: ReportFigures, key: str) -> Spec:
    return {"run": key, "x": run.edges.tolist(), "width": run.width}


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
    shown = range(0, len(run.edges), math.ceil(len(run.edges) / _MOST_STEPS))
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
    means = over(np.nansum(values, axis=0), (~np.isnan(values)).sum(axis=0).astype(np.float64))
    least, most = np.fmin.reduce(values), np.fmax.reduce(values)  # which pass over NaN
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
