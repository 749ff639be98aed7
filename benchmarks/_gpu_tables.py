"""The tables of evidence/results.md on accelerators, from the files of ``benchmarks.gpu``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Founds = Sequence[Mapping[str, Any]]

CONTESTS = {
    "overhead-1": "one rank, equal sizes",
    "overhead-2": "two ranks share the card, equal sizes",
    "unlike-ranks": "three ranks share the card, one computes each forward four times",
    "beside-cpu": "the card and the machine's CPU",
}


def contests_table(founds: Founds) -> list[str]:
    """Return a line for each contest between balanced and plain DDP."""
    lines = [
        "| ranks | backend | model | plain DDP, a step | balanced, times plain DDP's | sizes |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for name, called in CONTESTS.items():
        for one in _results(founds, name):
            ratio = one["over_plain"]["balanced"]
            low, high = ratio["limits_95"]
            lines.append(
                f"| {called} | {one['backend']} | {one['model']} |"
                f" {one['step_s']['plain']['median'] * 1e3:.0f} ms |"
                f" {ratio['median']:.3f} ({low:.3f} to {high:.3f}) |"
                f" {', '.join(map(str, one['batch_sizes']))} |"
            )
    return lines


def checks_table(founds: Founds) -> list[str]:
    """Return what was checked, and what came out."""
    lines = [
        "| parameters of two ranks in float64, sizes that change in every step, against one process"
        f" | off by {one['largest_relative_error']:.0e} at most |"
        for one in _results(founds, "exactness")
    ]
    for one in _results(founds, "out-of-memory"):
        for case, told in (("2 ranks, limited", "a limit"), ("1 ranks, filled", "a full card")):
            found = one[case]
            lines.append(
                f"| memory really ran out {found['num_out_of_memory']} times in"
                f" {found['num_steps']} steps, by {told}; parameters against steps with room |"
                f" off by {found['largest_relative_error']:.0e} at most |"
            )
    for one in _results(founds, "freshness"):
        found = one["1 ranks, newest"]
        late = ", ".join(found["steps_by_lateness"])
        lines += [
            "| where the host waits for the card in balanced steps, one rank, as torch's"
            f" `set_sync_debug_mode` tells | {found['num_waits']} waits |",
            f"| steps by which plans trail measurements, one rank | {late} |",
        ]
    return ["| check | found |", "| --- | --- |", *lines]


def source_lines(founds: Founds) -> list[str]:
    """Return on which machine, when and from which commit."""
    return [
        f"`python -m benchmarks.gpu`, {found['began'][:10]}, commit {machine['commit']},"
        f" {machine['devices'][0]['name']}, driver {machine['driver']}, PyTorch {machine['torch']},"
        f" {machine['cores']} cores, {sum(c['status'] == 'done' for c in found['cells'].values())}"
        " cells."
        for found in founds
        for machine in (found["machine"],)
    ]


def _results(founds: Founds, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield what a cell found on each machine where it was done."""
    for found in founds:
        cell = found["cells"].get(name, {"status": "not run"})
        if cell["status"] == "done":
            yield cell["result"]


TABLES = {
    "gpu-contests": contests_table,
    "gpu-checks": checks_table,
    "gpu-source": source_lines,
}
"""By their names on the page."""
