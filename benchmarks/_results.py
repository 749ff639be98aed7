"""Write the figures of evidence/results.md from files: `python -m benchmarks._results`.

The page has blocks, `<!-- results: SETUP TABLE -->` to `<!-- end -->`. What stands in between is
made here from `evidence/arena/SETUP.*.json`, or from `evidence/gpu/*.json` and
`evidence/servers.json`. Everything else on the page is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _gpu_tables, _server_tables
from benchmarks._common import ROOT, Row, main
from benchmarks.arena._cells import cells_of
from benchmarks.arena._figures import Spread, Standing, bound_of, paired, readings_gain, standings
from benchmarks.arena._papers import DYNAMIC_CLAIMS, SETUPS, exchange_for
from benchmarks.arena._setups import ArenaSetUp

NONE = "\N{EN DASH}"
PAGE, EVIDENCE = ROOT / "evidence" / "results.md", ROOT / "evidence" / "arena"
BLOCK = re.compile(r"(<!-- results: (\S+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Cells = Sequence[Mapping[str, Any]]

LBB_CLAIMS = (
    ("ddp", "SSGD", "64.57 %"),
    ("local-sgd", "local SGD", "59 %"),
    ("flexrr", "FlexRR (its abstract)", "5.4 %"),
    ("2-soft", "2-soft (its preprint's measurement)", "5.4 %"),
)
"""Contestant, what the paper calls it, and how much less time the paper's rule takes."""


def page(text: str, folder: Path) -> str:
    """Return the page with every block made anew from the files in ``folder``."""

    def made(match: re.Match[str]) -> str:
        head, setup, table, _, end = match.groups()
        return head + "\n".join(TABLES[table](_cells(folder, setup))) + "\n" + end

    return BLOCK.sub(made, text)


def _cells(folder: Path, setup: str) -> Cells:
    """Return the cells of a set-up that were run, the exact contestants' first.

    Of ``gpu`` all files, of ``servers`` the one that `make evidence` writes.
    """
    if setup == "servers":
        return [json.loads((folder.parent / "servers.json").read_text("utf-8"))]
    if setup == "gpu":
        paths = sorted((folder.parent / "gpu").glob("*.json"))
        return [json.loads(path.read_text("utf-8")) for path in paths]
    paths = [folder / cell.file_name for cell in cells_of(setup, quick=False)]
    return [json.loads(path.read_text("utf-8")) for path in paths if path.exists()]


def contestants_table(cells: Cells) -> list[str]:
    """Return a line for each contestant."""
    setup, duration_s = SETUPS[cells[0]["cell"]["setup"]], cells[0]["cell"]["duration_s"]
    lines = [
        f"| contestant | s per {setup.global_batch_size} samples | settled, times `auto`'s |"
        f" s to {setup.target:.0%} | accuracy after {duration_s:g} s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {one.name} | {_spread(one.step_s, '.3f')} | {_settled(one)} |"
        f" {_spread(one.to_target_s, '.1f')} | {_spread(one.accuracy, '.1%')} |"
        for one in standings(cells)
    ]
    return lines


def bound_table(cells: Cells) -> list[str]:
    """Return what the curves allow, and how much of it the rules for sizes reach.

    Where speeds do not change, the bound is that of settled steps as well.
    """
    of_name = {one.name: one for one in standings(cells)}
    setup, bound, ddp_s = _setup(cells), bound_of(cells[0]), _known(of_name["ddp"])
    settled = ("", "") if setup.trace.changes else (" share, settled |", " ---: |")
    lines = [
        f"| contestant | times as fast as `ddp` | bound | share |{settled[0]}",
        f"| --- | ---: | ---: | ---: |{settled[1]}",
    ]
    for one in of_name.values():
        if one.is_exact and one.name != "ddp":
            gain = ddp_s / _known(one)
            line = f"| {one.name} | {gain:.2f} | {bound:.2f} | {gain / bound:.0%} |"
            share = f" {_ratio(of_name['ddp']) / _ratio(one) / bound:.0%} |"
            lines.append(line if setup.trace.changes else line + share)
    return lines


def dynamic_table(cells: Cells) -> list[str]:
    """Return what dynamic batching's authors gained on these cores, and what exchange explains it.

    By speeds in proportion to cores, without rounding.
    """
    setup = _setup(cells)
    equal_s, total = float(setup.times.seconds(setup.equal).max()), setup.global_batch_size
    balanced_s, alone_s = total / setup.speeds.sum(), total / setup.speeds.max()
    lines = [
        "| what the paper trains | the paper | bound without exchange |"
        " exchange that gives the paper's, over the slowest worker's computing |"
        " with it, the fastest worker alone |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for what, name, gain in DYNAMIC_CLAIMS:
        if name == setup.name:
            exchange_s = exchange_for(gain, equal_s, balanced_s)
            known = exchange_s >= 0
            share = f"{exchange_s / equal_s:.2f}" if known else "none: it is above the bound"
            alone = f"{(equal_s + exchange_s) / alone_s:.1f}" if known else NONE
            bound = equal_s / balanced_s
            lines.append(f"| {what} | {gain:g} | {bound:.2f} | {share} | {alone} |")
    return lines


def narx_table(cells: Cells) -> list[str]:
    """Return NARX beside other forecasts of speeds under the same rule, and beside ``auto``."""
    of_name = {one["name"]: one for one in cells[0]["entries"]}
    setup = _setup(cells)
    lines = [
        f"Readings add {readings_gain(setup):.2f} to the R² of forecasts by past speeds.",
        "",
        "| contestant | settled, times `lb-bsp-2018`'s |",
        "| --- | ---: |",
    ]
    for name, one in of_name.items():
        if name != setup.rule:
            pair = paired(of_name[setup.rule], one, skip=setup.num_learning)
            assert pair is not None  # several turns
            lines.append(f"| {name} | {pair.ratio:.3f} ({pair.low:.3f} to {pair.high:.3f}) |")
    return lines


def lbb_table(cells: Cells) -> list[str]:
    """Return LBB's savings beside those that were measured here."""
    of_name = {one.name: one for one in standings(cells)}
    lines = [
        "| less time than | the paper's LBB | `lbb`, per sample | `auto`, per sample |"
        " `lbb`, to the target | `auto`, to the target |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, called, claim in LBB_CLAIMS:
        if name in of_name:
            other = of_name[name]
            figures = [
                _saving(getattr(of_name[ours], what), getattr(other, what))
                for what in ("step_s", "to_target_s")
                for ours in ("lbb", "auto")
            ]
            lines.append(f"| {called} | {claim} | {' | '.join(figures)} |")
    return lines


def source_lines(cells: Cells) -> list[str]:
    """Return by which command, on which machine and when, and how far the emulation held."""
    setup, found = cells[0]["cell"]["setup"], standings(cells)
    machine = cells[0]["machine"]
    days = " and ".join(sorted({cell["ended"][:10] for cell in cells}))
    return [
        f"`python -m benchmarks.arena --only {setup} --resume evidence/arena`, {days},"
        f" {machine['cores']} shared cores, Python {machine['python']}."
        f" A worker's CPU time was at most {max(one.cpu_share for one in found):.0%} of what its"
        " device took; sleeps ended late by"
        f" {max(one.late_ms for one in found):.0f} ms at most (95th percentile of the worst"
        " worker)."
    ]


TABLES: Mapping[str, Callable[[Cells], list[str]]] = {
    "contestants": contestants_table,
    "bound": bound_table,
    "dynamic": dynamic_table,
    "lbb": lbb_table,
    "narx": narx_table,
    "source": source_lines,
    **_gpu_tables.TABLES,
    **_server_tables.TABLES,
}


def _setup(cells: Cells) -> ArenaSetUp:
    return SETUPS[cells[0]["cell"]["setup"]]


def _ratio(one: Standing) -> float:
    """Return its settled steps over ``auto``'s."""
    assert one.settled is not None  # of several turns
    return one.settled.ratio


def _settled(one: Standing) -> str:
    if one.name == "auto" or one.settled is None:
        return "1" if one.is_exact else NONE
    return f"{one.settled.ratio:.3f} ({one.settled.low:.3f} to {one.settled.high:.3f})"


def _spread(spread: Spread, form: str) -> str:
    """Return a mean with its deviation, or how many seeds came there."""
    if spread.mean is None:
        num_known = sum(value is not None for value in spread.values)
        return f"reached by {num_known} of {len(spread.values)} seeds"
    text = f"{spread.mean:{form}}"
    return text if spread.deviation is None else f"{text} ± {spread.deviation:{form}}"


def _saving(ours: Spread, theirs: Spread) -> str:
    if ours.mean is None or theirs.mean is None:
        return NONE
    return f"{1 - ours.mean / theirs.mean:.1%}"


def _known(one: Standing) -> float:
    assert one.step_s.mean is not None  # every seed was timed
    return one.step_s.mean


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Write the page."""
    before = PAGE.read_text("utf-8")
    after = page(before, EVIDENCE)
    PAGE.write_text(after, "utf-8")
    yield Row(str(PAGE.relative_to(ROOT)), "reported", {"is_changed": before != after})


if __name__ == "__main__":
    main(__doc__ or "", rows)
