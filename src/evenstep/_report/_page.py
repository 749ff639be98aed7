"""One run, or two side by side, as a page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from ._chart_data import as_script, highest
from ._charts import Drawn, overlaid, waiting_shares
from ._markup import table, text
from ._run_figures import ReportFigures
from ._sayings import differences, lasting, saved, waiting_share
from ._sections import Section, sections

_LETTERS = ("a", "b")


def page(runs: Sequence[ReportFigures], *, version: str, made: str) -> str:
    """Return the page.

    Args:
        runs: one, or two to compare.
        version: of evenstep.
        made: when it is written, as text.
    """
    names = _names(runs)
    high = highest(*map(waiting_shares, runs)) if len(runs) > 1 else None
    parts = [Section("compare", "The two runs", *_compared(runs, names))] if len(runs) > 1 else []
    for key, name, run in zip(_LETTERS, names, runs, strict=False):
        begin = f"{name}: " if len(runs) > 1 else ""
        for part in sections(run, key, high=high):
            title = begin + (part.title if not begin else part.title.lower())
            parts.append(Section(part.name, title, part.html, part.charts))
    title = f"Report: {' and '.join(names)}"
    words = "How evenstep balanced a run" if len(runs) == 1 else "How evenstep balanced two runs"
    assets = files(__package__) / "assets"

    def asset(name: str) -> str:
        return (assets / name).read_text("utf-8")

    charts = {one.name: one.spec for part in parts for one in part.charts}
    return Template(asset("page.html")).substitute(
        title=escape(title),
        subtitle=escape(words),
        style=asset("uPlot.min.css") + asset("report.css"),
        links="".join(f'<li><a href="#{p.name}">{escape(p.title)}</a></li>' for p in parts),
        body="".join(map(_section, parts)),
        footer=escape(f"Made by evenstep {version}, {made}. Charts: uPlot 1.6.32, MIT licence."),
        charts=as_script(charts),
        script=f"/*\n{asset('uPlot-LICENSE')}*/\n{asset('uPlot.iife.min.js')}{asset('report.js')}",
    )


def _section(part: Section) -> str:
    heading = f'<h2 id="{part.name}-title">{escape(part.title)}</h2>'
    return (
        f'<section id="{part.name}" aria-labelledby="{part.name}-title">'
        f"{heading}{part.html}</section>"
    )


def _names(runs: Sequence[ReportFigures]) -> list[str]:
    names = [run.name or "run" for run in runs]
    if len(set(names)) < len(names):
        return [f"{name} ({letter})" for name, letter in zip(names, "AB", strict=True)]
    return names


def _compared(runs: Sequence[ReportFigures], names: Sequence[str]) -> tuple[str, tuple[Drawn, ...]]:
    first, second = runs
    told = "".join(text("li", line) for line in differences(first, second, names[1]))
    rows = [
        ["Step", *(lasting(run.savings.elapsed_s / run.num_steps) for run in runs)],
        ["Measured time", *(lasting(run.savings.elapsed_s) for run in runs)],
        ["Steps", *(f"{run.num_steps:,}" for run in runs)],
        ["Saved against the equal split", *map(saved, runs)],
        ["Waiting for other ranks", *(f"{100 * waiting_share(run):.1f} %" for run in runs)],
    ]
    drawn = overlaid(dict(zip(names, runs, strict=True)))
    charts = () if drawn is None else (drawn,)
    html = f"<ul>{told}</ul>" + table("Both runs", ["Figure", *names], rows)
    return html + "".join(one.html for one in charts), charts
