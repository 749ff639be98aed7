"""One run, or two side by side, as a page that needs nothing but itself, section by section."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template

import numpy as np

from .._render import counted, number, percent, seconds, sizes
from .._telemetry._line import shares
from ._charts import (
    MOST_ROWS,
    Charts,
    account,
    as_script,
    exchanges,
    folded,
    highest,
    key_figures,
    of_ranks,
    overlaid,
    step_times,
    table,
    text,
    waiting,
    waiting_shares,
)
from ._read_figures import LinkFigures, ReportFigures
from ._sentences import (
    LABELS,
    differences,
    ended,
    headline,
    lasting,
    rank_name,
    saved,
    still_lost,
    waiting_share,
)
from ._step_tally import PARTS

_LETTERS = ("a", "b")
_MOST_FAULTS = 400


def page(runs: Sequence[ReportFigures], *, version: str, made: str) -> str:
    """Return the page.

    Args:
        runs: one, or two to compare.
        version: of evenstep.
        made: when it is written, as text.
    """
    names = [run.name or "run" for run in runs]
    if len(set(names)) < len(names):
        names = [f"{name} ({letter})" for name, letter in zip(names, "AB", strict=True)]
    high = highest(*map(waiting_shares, runs)) if len(runs) > 1 else None
    charts: Charts = {}
    parts: list[Section] = []
    if len(runs) > 1:
        parts.append(("compare", "The two runs", _compared(charts, runs, names)))
    for key, name, run in zip(_LETTERS, names, runs, strict=False):
        for part, heading, html in _sections(charts, run, key, high):
            of_two = f"{name}: {heading.lower()}"
            parts.append((f"{key}-{part}", of_two if len(runs) > 1 else heading, html))
    title = f"Report: {' and '.join(names)}"
    words = "How evenstep balanced a run" if len(runs) == 1 else "How evenstep balanced two runs"
    assets = files(__package__) / "assets"

    def asset(name: str) -> str:
        return (assets / name).read_text("utf-8")

    return Template(asset("page.html")).substitute(
        title=escape(title),
        subtitle=escape(words),
        style=asset("uPlot.min.css") + asset("report.css"),
        links="".join(f'<li><a href="#{name}">{escape(head)}</a></li>' for name, head, _ in parts),
        body="".join(
            f'<section id="{name}" aria-labelledby="{name}-title">'
            f'<h2 id="{name}-title">{escape(heading)}</h2>{html}</section>'
            for name, heading, html in parts
        ),
        footer=escape(f"Made by evenstep {version}, {made}. Charts: uPlot 1.6.32, MIT licence."),
        charts=as_script(charts),
        script=f"/*\n{asset('uPlot-LICENSE')}*/\n{asset('uPlot.iife.min.js')}{asset('report.js')}",
    )


Section = tuple[str, str, str]
"""What links lead to, the heading, and what is below it."""


def _compared(charts: Charts, runs: Sequence[ReportFigures], names: Sequence[str]) -> str:
    first, second = runs
    inner = "".join(text("li", line) for line in differences(first, second, names[1]))
    rows = [
        ["Step", *(lasting(run.steps.elapsed_s / run.num_steps) for run in runs)],
        ["Measured time", *(lasting(run.steps.elapsed_s) for run in runs)],
        ["Steps", *(f"{run.num_steps:,}" for run in runs)],
        ["Saved against the equal split", *map(saved, runs)],
        ["Waiting for other ranks", *(f"{100 * waiting_share(run):.1f} %" for run in runs)],
    ]
    html = f"<ul>{inner}</ul>" + table("Both runs", ["Figure", *names], rows)
    return html + overlaid(charts, dict(zip(names, runs, strict=True)))


def _sections(
    charts: Charts, run: ReportFigures, key: str, high: float | None
) -> Iterator[Section]:
    """Yield what is reported of a run; ``high`` is waiting with the darkest color."""
    yield "summary", "Summary", _summary(run)
    yield "lost", "What is still lost, and why", _lost(run)
    html = step_times(charts, run, key) + account(charts, run, key)
    yield "time", "Time", html + waiting(charts, run, key, high)
    yield "ranks", "Ranks", of_ranks(charts, run, key) + _plans(run) + _ranks(run)
    if run.links is not None:
        html = exchanges(charts, run, run.links, key)
        html += _measured_links(run, run.links) + _shares(run.links)
        yield "links", "Links and shares", html
    yield "faults", "Faults", _faults(run)
    yield "settings", "Settings", _settings(run)


def _summary(run: ReportFigures) -> str:
    elapsed_s = run.steps.elapsed_s
    figures = {
        "Saved against the equal split": saved(run),
        "Waiting for other ranks": f"{percent(waiting_share(run))} %",
        "Measured time": lasting(elapsed_s),
        "Steps": f"{run.num_steps:,}",
        "Samples per second": f"{run.steps.rank_samples.sum() / elapsed_s:,.0f}"
        if elapsed_s
        else "unknown",
        "Ranks": str(run.world_size),
    }
    notes = []
    if run.left_out:
        notes.append(f"Not all of the file could be used: {ended(run.left_out)}")
    if run.num_starts > 1:
        notes.append(
            f"Training began {run.num_starts} times in this file. Figures are of all starts "
            "together, settings of the newest."
        )
    if not run.is_ended:
        notes.append("The run has no end in this file: it is still training, or was stopped.")
    inner = "".join(f'<p class="note">{text("span", note)}</p>' for note in notes)
    return inner + text("p", headline(run), kind="headline") + key_figures(figures)


def _lost(run: ReportFigures) -> str:
    html = text("p", still_lost(run))
    if run.accounts is not None:
        spent = run.accounts.rank_part_s.sum(axis=0)
        total = spent.sum() or 1.0
        rows = [
            [
                LABELS[PARTS[at]],
                lasting(spent[at] / run.world_size),
                f"{percent(spent[at] / total)} %",
            ]
            for at in np.argsort(-spent, kind="stable").tolist()
        ]
        header = ["Part of a step", "time, mean of ranks", "share"]
        html += table("Where the time of all ranks went", header, rows)
    return html + _causes(run)


def _causes(run: ReportFigures) -> str:
    found = run.diagnosed
    if found is None:
        return text("p", "No causes of waiting were looked for in this run.", kind="quiet")
    html = ""
    if found.num_without:
        why = ended(found.no_verdict)
        words = f"{found.num_without} of {found.num} diagnoses give no verdict: {why}"
        html += text("p", words, kind="quiet")
    if not found.causes:
        return html
    shown = found.causes[:MOST_ROWS]
    caption = "Causes of waiting, the costliest first"
    if len(shown) < len(found.causes):
        caption += f"; {len(shown)} of {len(found.causes)}"
    if found.explained_share is not None:
        caption += f". They explain {percent(found.explained_share)} % of the waiting"
    rows = [
        [
            one.cause,
            "all" if one.rank < 0 else rank_name(run, one.rank),
            one.evidence,
            one.remedy,
            lasting(one.lost_s),
            f"{one.num}",
        ]
        for one in shown
    ]
    header = ["Cause", "rank", "evidence", "what to do", "cost", "diagnoses"]
    return html + table(caption, header, rows, left=4)


def _plans(run: ReportFigures) -> str:
    if not run.num_changes:
        return text("p", "The batch sizes never changed.")
    caption = "Changes of the batch sizes"
    if len(run.changes) < run.num_changes:
        caption += f": the {len(run.changes)} largest of {run.num_changes:,}"
    rows = [
        [
            f"{change.event.step:,}",
            change.event.reason,
            _sizes(change.event.batch_size, change.before),
            f"{percent(change.moved_share)} %",
        ]
        for change in run.changes
    ]
    header = ["Step", "reason", "sizes", "samples moved"]
    most = max(run.changes, key=lambda change: change.moved_share)
    words = (
        f"The batch sizes changed {counted(run.num_changes, 'time')}. The largest change, at step "
        f"{most.event.step:,}, moved {percent(most.moved_share)} % of the samples: "
        f"{ended(most.event.reason)}"
    )
    return text("p", words) + folded(caption, table(caption, header, rows, left=3))


def _sizes(now: Sequence[int], before: Sequence[int] | None) -> str:
    """Return all sizes of a few ranks; of many, the ranks that changed most."""
    if len(now) <= 8:
        return sizes(now)
    if before is None:
        return f"{min(now)} to {max(now)} on {len(now)} ranks"
    by = sorted(range(len(now)), key=lambda rank: (-abs(now[rank] - before[rank]), rank))
    inner = ", ".join(f"rank {rank} {before[rank]} to {now[rank]}" for rank in by[:3])
    num = sum(new != old for new, old in zip(now, before, strict=True))
    return inner if num <= 3 else f"{inner}; {num} ranks changed"


def _ranks(run: ReportFigures) -> str:
    steps = run.steps
    order = np.arange(run.world_size)
    caption = "Ranks"
    if run.world_size > MOST_ROWS:
        order = np.argsort(-steps.caused_s, kind="stable")[:MOST_ROWS]
        caption = f"The {MOST_ROWS} of {run.world_size} ranks that the others waited for longest"
    rows = [_rank(run, rank) for rank in order.tolist()]
    header = [
        "Rank", "device", "samples", "samples/s", "computing", "waited", "slowest in",
        "others waited for it",
    ]  # fmt: skip
    return table(caption, header, rows, left=2)


def _rank(run: ReportFigures, rank: int) -> list[str]:
    steps = run.steps
    devices = run.start.devices if run.start else ()
    computing_s = float(steps.rank_compute_s[rank])
    return [
        rank_name(run, rank),
        devices[rank] if rank < len(devices) else "unknown",
        f"{steps.rank_samples[rank]:,.0f}",
        number(steps.rank_samples[rank] / computing_s) if computing_s else "unknown",
        lasting(computing_s),
        lasting(float(steps.rank_idle_s[rank])),
        f"{steps.num_slowest[rank]:,} steps",
        lasting(float(steps.caused_s[rank])),
    ]


def _measured_links(run: ReportFigures, links: LinkFigures) -> str:
    if links.first is None or links.last is None:
        return ""
    ways = [(one.up_bytes_per_s, one.down_bytes_per_s) for one in (links.first, links.last)]
    columns = [speeds for way in ways for speeds in way]
    order = sorted(range(len(columns[-1])), key=lambda rank: (columns[-1][rank], rank))
    caption = f"Links in Mbit/s, measured {counted(links.num_measured, 'time')}; the slowest first"
    if len(order) > MOST_ROWS:
        caption += f", {MOST_ROWS} of {len(order)} ranks"
    rows = [
        [
            rank_name(run, rank),
            *(f"{8 * one[rank] / 1e6:,.0f}" if rank < len(one) else "" for one in columns),
        ]
        for rank in order[:MOST_ROWS]
    ]
    return table(caption, ["Rank", "first, up", "first, down", "newest, up", "newest, down"], rows)


def _shares(links: LinkFigures) -> str:
    if not links.shares:
        return ""
    caption = "Plans of shares"
    if len(links.shares) < links.num_shares:
        caption += f": the newest {len(links.shares)} of {links.num_shares}"
    rows = []
    for plan in links.shares:
        parts = "plain all-reduce" if plan.parts is None else f"{len(plan.parts)} ranks"
        if plan.parts is not None and len(plan.parts) <= 16:
            parts = shares(plan.parts)
        times = (plan.predicted_s, plan.plain_s)
        cells = ["unknown" if each_s is None else seconds(each_s) for each_s in times]
        rows.append([f"{plan.step:,}", plan.reason, parts, *cells])
    header = ["Step", "reason", "shares in percent", "predicted", "plain all-reduce"]
    return table(caption, header, rows, left=3)


def _faults(run: ReportFigures) -> str:
    if not run.mishaps:
        return text("p", "None was recorded.")
    rows = [
        [
            f"{one.step:,}",
            one.kind,
            "" if one.rank is None else rank_name(run, one.rank),
            one.text,
            f"{one.num:,}",
        ]
        for one in run.mishaps[-_MOST_FAULTS:]
    ]
    caption = "What went wrong, or was limited; the newest of each kind"
    if len(rows) < len(run.mishaps):
        caption += f", and {len(rows)} of {len(run.mishaps)}"
    return table(caption, ["Step", "event", "rank", "what happened", "times"], rows, left=4)


def _settings(run: ReportFigures) -> str:
    start = run.start
    if start is None:
        return text("p", "The start of the run was not recorded.")
    rows = [
        ["Policy", start.policy],
        ["Samples of a step", f"{start.global_batch_size:,}"],
        ["Steps of an epoch", f"{start.num_steps:,}" if start.num_steps else "a stream"],
        ["Ranks", f"{start.world_size}"],
        ["Hosts", f"{len(set(start.hosts))}"],
        ["Devices", _counted(start.devices)],
        *([["Versions", ", ".join(start.versions)]] if start.versions else []),
        ["Starts", f"{run.num_starts}"],
        ["Steps measured", f"{run.num_steps:,}, from {run.first_step:,} to {run.last_step:,}"],
        ["Steps in a stretch of the charts", f"{run.width:,}"],
    ]
    return table("The run, as of its newest start", ["Setting", "value"], rows, left=2)


def _counted(devices: Sequence[str]) -> str:
    """Return the kinds of device with their number, without the index of each."""
    kinds = Counter(one.partition(" ")[2] or one.partition(":")[0] for one in devices)
    return ", ".join(f"{num} x {kind}" for kind, num in kinds.items())
