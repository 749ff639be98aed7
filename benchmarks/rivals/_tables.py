"""The rivals' tables of docs/results.md, from their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.rivals._environments import RIVALS
from benchmarks.rivals._figures import Figure, settled_ratio, summed_up
from benchmarks.rivals._task import GLOBAL_BATCH_SIZE

NONE = "\N{EN DASH}"
Founds = Sequence[Mapping[str, Any]]


def seconds_table(founds: Founds) -> list[str]:
    """Return a line for each rival that was timed."""
    ours = {found["rival"]: found for found in founds}["evenstep"]
    lines = [
        f"| rival | samples of an update | s per {GLOBAL_BATCH_SIZE} samples | settled |"
        " settled, times evenstep's | accuracy | rounds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for found in founds:
        one, task = summed_up(found), found["task"]
        if found["error"] is None and RIVALS[found["rival"]].is_timed:
            ratio = None if found is ours else settled_ratio(found, ours)
            figures = [_told(one.step_s, ".3f"), _told(one.settled_s, ".3f")]
            figures += ["1" if found is ours else _told(ratio, ".2f"), _told(one.accuracy, ".1%")]
            lines.append(
                f"| {found['rival']} | {task['global_batch_size']} | {' | '.join(figures)} |"
                f" {one.num_done} |"
            )
    return lines


def failures_table(founds: Founds) -> list[str]:
    """Return a line for each rival that was not installed, or of which a round failed."""
    lines = ["| rival | rounds that failed | the last one's error |", "| --- | ---: | --- |"]
    for found in founds:
        failed = [each for each in found["rounds"] if each["status"] != "done"]
        if found["error"] is not None:
            lines.append(f"| {found['rival']} | not installed | {_line(found['error'])} |")
        elif failed:
            of_all = f"{len(failed)} of {len(found['rounds'])}"
            lines.append(f"| {found['rival']} | {of_all} | {_line(failed[-1]['error'])} |")
    return lines


def source_lines(founds: Founds) -> list[str]:
    """Return by which command, on which machine and when, and what was installed."""
    days = sorted({each["ended"][:10] for found in founds for each in found["rounds"]})
    shares = [each["cpu_share"] for found in founds for each in found["rounds"] if _done(each)]
    machine = founds[0]["machine"]
    installed = {name: told for found in founds for name, told in found["installed"].items()}
    return [
        f"`{max((found['command'] for found in founds), key=len)}`, {' and '.join(days)},"
        f" {machine['cores']} shared cores, Python {machine['python']}. A worker's CPU time was at"
        f" most {max(shares):.0%} of what its device took.",
        "",
        "Installed: " + ", ".join(f"{name} {told[:12]}" for name, told in installed.items()) + ".",
    ]


def _done(round_: Mapping[str, Any]) -> bool:
    return round_["status"] == "done"


def _told(figure: Figure | None, form: str) -> str:
    if figure is None:
        return NONE
    mean, deviation = figure
    text = f"{mean:{form}}"
    return text if deviation is None else f"{text} ± {deviation:{form}}"


def _line(error: str) -> str:
    """Return the line that says what happened: the first, or the last that names an error."""
    first, *others = error.splitlines()
    named = [line for line in others if "error" in line.lower()]
    said = first if first.startswith("ended after") or not named else named[-1]
    return said.replace("|", "\\|")


TABLES = {
    "rivals-seconds": seconds_table,
    "rivals-failures": failures_table,
    "rivals-source": source_lines,
}
