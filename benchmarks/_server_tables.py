"""The tables of evidence/results.md on parameter servers, from what `benchmarks.servers` wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Founds = Sequence[Mapping[str, Any]]

CALLED = {
    "knowing": "the best, by a planner that is told the links",
    "optimal": "evenstep's, which follow them",
    "proportional": "by the paper's rule, which follow them",
    "equal": "equal",
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
        f"- {row['what'].split(', ')[1].capitalize()}: the links allow"
        f" {row['measured']['faster_than_equal_by_bound']:.2f} times equal shares, with no latency"
        f" and chunks of no size. evenstep took {row['measured']['exchanges']['optimal']} steps in"
        f" {row['measured']['draws_of_each']} draws of the links, and with its first three it has"
        f" {row['measured']['part_of_gain_with_the_start']:.0%} of the knowing planner's gain."
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
