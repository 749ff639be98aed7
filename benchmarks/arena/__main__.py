"""Real training beside what a user would pick instead: papers' machines, emulated by sleeping.

Processes over gloo train a CNN on scikit-learn's digits. Each worker's device takes the time of
its curve in a paper, slowed by a trace. Exact contestants take turns; the others train alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._common import Row, main
from benchmarks.arena._cells import cells_of, found_in
from benchmarks.arena._figures import Standing, bound_of, readings_gain, standings
from benchmarks.arena._papers import SETUPS
from benchmarks.narx import EXPLAINS

DEFAULT = [name for name in SETUPS if name != "lbb-periodic"]
SHARE_OF_BOUND, CLOSE = 0.9, 1.03


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Race on each set-up, or read what was found before."""
    with ExitStack() as stack:
        folder = options.resume or Path(stack.enter_context(TemporaryDirectory()))
        for name in options.only or (["lbb-static"] if options.quick else DEFAULT):
            exact, *others = cells_of(name, quick=options.quick)
            found = [found_in(folder, exact)]  # nothing beside it: it is timed step by step
            with ThreadPoolExecutor(options.jobs) as pool:
                found += pool.map(lambda cell: found_in(folder, cell), others)
            for row in of_setup(name, found):
                # In a few seconds the first steps, of equal sizes, are most of them.
                yield replace(row, met=None) if options.quick else row


def of_setup(name: str, cells: list[dict[str, Any]]) -> Iterator[Row]:
    """Say who is first by seconds per step, how near to the bound, and who trains fastest."""
    standing = {one.name: one for one in standings(cells)}
    exact = [one for one in standing.values() if one.is_exact]
    seconds = {one.name: _mean(one.step_s.mean) for one in exact}
    settled = {one.name: one.settled.ratio if one.settled else 1.0 for one in exact}
    bound, gain = bound_of(cells[0]), seconds["ddp"] / seconds["auto"]
    yield Row(
        f"{name}: seconds per step of exact contestants",
        "settled, auto or hybrid is first, or within 3 % of the first",
        {**seconds, **{f"{rival}_over_auto": ratio for rival, ratio in settled.items()}},
        min(settled["auto"], settled["hybrid"]) <= CLOSE * min(settled.values()),
    )
    yield Row(
        f"{name}: auto over plain DDP, first steps included",
        f">= {SHARE_OF_BOUND:.0%} of the bound, where speeds do not change",
        {"gain": gain, "bound": bound, "share": gain / bound},
        gain / bound >= SHARE_OF_BOUND if name.endswith("static") else None,
    )
    yield Row(
        f"{name}: seconds to an accuracy of {SETUPS[name].target:g}, and accuracy at the end",
        "reported",
        {one.name: _trained(one) for one in standing.values()},
    )
    if name.startswith("narx"):
        yield _forecasts(name, settled)
    yield Row(
        f"{name}: CPU time of a worker over what its device takes",
        "at most a fifth",
        {one.name: one.cpu_share for one in standing.values()},
        max(one.cpu_share for one in standing.values()) <= 0.2,
    )


def _forecasts(name: str, settled: dict[str, float]) -> Row:
    """Say whether NARX is first among forecasts, where readings explain the load; else, how far."""
    explained, narx = readings_gain(SETUPS[name]), settled[SETUPS[name].rule]
    is_first = narx <= min(settled["ema"], settled["last-value"])
    return Row(
        f"{name}: forecasts of speeds, settled steps over auto's",
        "first" if explained >= EXPLAINS else "at most 1.02",
        {"r2_gain": explained, "narx": narx, **{k: settled[k] for k in ("ema", "last-value")}},
        is_first if explained >= EXPLAINS else narx <= 1.02,
    )


def _trained(one: Standing) -> list[float | None]:
    return [one.to_target_s.mean, one.accuracy.mean]


def _mean(value: float | None) -> float:
    assert value is not None  # one seed, which was timed
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add where cells are kept, and which set-ups are raced."""
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="keeps each cell that was run, and runs those that are missing or of other code",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SETUPS,
        metavar="SETUP",
        help=f"these set-ups alone, of {', '.join(SETUPS)}",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="races of inexact contestants at the same time"
    )


if __name__ == "__main__":
    main(__doc__ or "", rows, add_options)
