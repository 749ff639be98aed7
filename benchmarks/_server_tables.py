"""The tables of docs/results.md on parameter servers, from the file of ``benchmarks.servers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Founds = Sequence[Mapping[str, Any]]

CALLED = {
    "knowing": "a planner that is told the links",
    "optimal": "`Network()`, which follows them",
    "proportional": "the paper's rule, which follows them",
    "equal": "equal shares",
    "hash-to-one": "all on one server",
}


def servers_table(founds: Founds) -> list[str]:
    """Return a line for each contestant, on dedicated servers and on collocated ones."""
    lines = [
        "| servers | shares | s per step | times as fast as equal shares | as one server |"
        " part of the knowing planner's gain |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in _rows(founds):
        figures, kind = row["measured"], row["what"].split(", ")[1]
        mean_s = figures["mean_s"]
        for name, called in CALLED.items():
            gain = (mean_s["equal"] - mean_s[name]) / (mean_s["equal"] - mean_s["knowing"])
            part = f"{gain:.0%}" if name in ("optimal", "proportional") else "\N{EN DASH}"
            lines.append(
                f"| {kind} | {called} | {mean_s[name]:.2f} |"
                f" {figures['faster_than_equal'][name]:.2f} |"
                f" {figures['faster_than_last'][name]:.2f} | {part} |"
            )
    return lines


def bounds_lines(founds: Founds) -> list[str]:
    """Return what the links allow, beside what the paper says."""
    return [
        f"- {row['what'].split(', ')[1]}: the links, with no latency and chunks of no size, allow"
        f" {row['measured']['faster_than_equal_by_bound']:.2f} times equal shares. Followers lose"
        " their first exchanges over new links:"
        f" {row['measured']['exchanges']['optimal']} steps of `Network()` in"
        f" {row['measured']['draws_of_each']} draws."
        for row in _rows(founds)
    ]


def source_lines(founds: Founds) -> list[str]:
    """Return by which command, on which machine and when."""
    return [
        f"`sudo python -m benchmarks.servers`, {found['ended'][:10]},"
        f" {found['machine']['cores']} shared cores, Python {found['machine']['python']}."
        f" {_rows([found])[0]['what'].split(', ')[0].capitalize()}."
        for found in founds
    ]


def _rows(founds: Founds) -> list[Mapping[str, Any]]:
    return [row for found in founds for row in found["rows"]]


TABLES = {
    "servers-shares": servers_table,
    "servers-bounds": bounds_lines,
    "servers-source": source_lines,
}
"""By their names on the page."""
