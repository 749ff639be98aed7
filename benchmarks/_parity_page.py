"""Write the table of docs/parity.md: ``python -m benchmarks._parity_page``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._common import ROOT

EVIDENCE, PAGE = ROOT / "evidence" / "parity.json", ROOT / "docs" / "parity.md"
BLOCK = re.compile(r"(<!-- parity -->\n)(.*?)(<!-- end -->)", re.DOTALL)
COLUMNS = (
    "added", "model", "ranks", "work, ms", "calls", "files", "thread, µs", "own threads, µs",
    "step, sleeping", "step, computing", "memory, KB", "losses",
)  # fmt: skip
NONE = "\N{EN DASH}"
KINDS = ("python", "tensors")  # whose peaks of memory are shown
Measured = Mapping[str, Any]


def page(text: str, found: Measured) -> str:
    """Return the page with the table of what ``benchmarks.parity`` found."""
    made = "\n".join([*table(found["rows"]), "", *source(found)])
    return BLOCK.sub(lambda block: f"{block[1]}{made}\n{block[3]}", text)


def table(rows: Sequence[Measured]) -> list[str]:
    """Return a line for each model, number of ranks and length of a step."""
    groups: dict[Any, list[Measured]] = {}
    memory = {}
    for row in rows:
        measured = row["measured"]
        cell = measured["cell"]
        key = (cell["rival"], cell["wrapper"], cell["num_ranks"], cell["step_s"])
        if "bytes" in measured:
            memory[key[:3]] = measured["bytes"]
        elif "step" in measured:
            groups.setdefault(key, []).append(measured)
    rivals = list(dict.fromkeys(key[0] for key in groups))
    order = sorted(groups, key=lambda key: (rivals.index(key[0]), *key[1:]))
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- | --- |" + " ---: |" * 9 + " --- |"]
    return lines + [line(key, groups[key], memory.get(key[:3])) for key in order]


def line(key: tuple[str, str, int, float], pairs: Sequence[Measured], memory: Any) -> str:
    """Return a line of the table.

    Args:
        key: what is added, the model's wrapper, how many ranks, and the seconds of the work.
        pairs: what was measured of each pair of loops.
        memory: bytes of both loops; None where they were not measured.
    """
    rival, wrapper, num_ranks, step_s = key
    calls = [max(pair["calls"][kind][rank] for pair in pairs for rank in range(num_ranks))
             for kind in ("median", "max")]  # fmt: skip
    files = max(max(pair["files"]["most"]) for pair in pairs)
    thread = [pair["thread_us"]["more"] for pair in pairs if pair["cell"]["work"] == "sleeping"]
    cells = [
        f"`{rival}`" if rival in ("Join", "even_batches") else rival,
        wrapper,
        num_ranks,
        f"{1e3 * step_s:g}",
        f"{calls[0]:g}, {calls[1]:g}",
        files,
        f"{spanned([one['mean'] for one in thread])}, p99 {max(one['p99'] for one in thread):+.0f}",
        spanned([pair["own_threads_us"]["mean"] for pair in pairs]),
        *(slowest(pairs, work) for work in ("sleeping", "computing")),
        NONE if memory is None else more_of(memory),
        "equal" if all(pair["losses_equal"] for pair in pairs) else "**differ**",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def spanned(figures: Sequence[float]) -> str:
    """Return the least and the most of some figures, once if they read alike."""
    least, most = f"{min(figures):.0f}", f"{max(figures):.0f}"
    return least if least == most else f"{least} to {most}"


def slowest(pairs: Sequence[Measured], work: str) -> str:
    """Return the largest ratio of two steps with this work, and the largest bound."""
    here = [pair for pair in pairs if pair["cell"]["work"] == work]
    if not here:
        return NONE
    ratio, bound = (max(pair["step"][key] for pair in here) for key in ("ratio", "at_most"))
    return f"{ratio:.3f}, < {bound:.3f}{'*' * any(pair['contended'] for pair in here)}"


def more_of(memory: Mapping[str, Mapping[str, int]]) -> str:
    """Return what the other loop takes more, in kilobytes: of Python, and of tensors."""
    python, tensors = (memory["other"][kind] - memory["plain"][kind] for kind in KINDS)
    return f"{1e-3 * python:+.0f}, {1e-3 * tensors:+.1f}"


def source(found: Measured) -> list[str]:
    """Return the lines below the table: compiled models, and where all of it is from."""
    cores, python = found["machine"]["cores"], found["machine"]["python"]
    return [
        f"\\* More ranks compute than there are cores, and contend.{compiled(found['rows'])}",
        "",
        f"`python -m benchmarks.parity --json`, {found['ended'][:10]}, {cores} shared cores,"
        f" Python {python}. `python -m benchmarks._parity_page` writes the table from"
        " `evidence/parity.json`.",
    ]


def compiled(rows: Sequence[Measured]) -> str:
    """Return a sentence on graphs of a compiled model; nothing where none was compiled."""
    for row in rows:
        plain, other = (row["measured"].get(name) for name in ("plain", "other"))
        if plain is not None:
            return (
                f" A model compiled inside of DDP, with evenstep and without: graphs"
                f" {other['graphs']} and {plain['graphs']}, breaks {other['breaks']} and"
                f" {plain['breaks']}."
            )
    return ""


def main() -> None:
    """Write the table into its place on the page."""
    found = json.loads(EVIDENCE.read_text("utf-8"))
    PAGE.write_text(page(PAGE.read_text("utf-8"), found), "utf-8")


if __name__ == "__main__":
    main()
