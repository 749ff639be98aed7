"""``evenstep simulate``: any scenarios, policies and schemes against the plan that knows all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .._install import install_line
from .._render._words import terminal_width
from ._board import Leaderboard, as_json, as_markdown, as_text
from ._common import fail, import_from_here, refused
from ._contest import Contest, check_jobs, contest_of
from ._length_splits import HiddenSize, Lengths, Padded, check_lengths_alone
from ._progress_bar import Progress
from ._simulate_lengths import LengthCase, length_cases, lengths_json, lengths_text
from ._trials import play, play_all

Scenarios = Annotated[
    str | None, typer.Option(help="Comma-separated names (default: the first eight).")
]
Policies = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated names or module:Class (default: all that need no settings)."
    ),
]
Traces = Annotated[
    list[Path] | None,
    typer.Option(help="A run's folder, its events.jsonl, or a table; may be given several times."),
]
Steps = Annotated[
    int | None, typer.Option(help="Steps of drawn scenarios (default: 600; with --lengths 200).")
]
Seeds = Annotated[
    str | None,
    typer.Option(help="Number of seeds, from 0, or a range such as 1000-1007 (default: 4)."),
]
Samples = Annotated[
    int | None,
    typer.Option(help="Samples per step (default: 64 per worker, or that of the trace)."),
]


def simulate(
    scenario: Scenarios = None,
    policy: Policies = None,
    scheme: Annotated[
        str, typer.Option(help="Comma-separated: bsp, hybrid or module:Class.")
    ] = "bsp",
    trace: Traces = None,
    intercepts: Annotated[
        str | None,
        typer.Option(help="Fixed seconds of a step in traces, one number or one per worker."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Workers of drawn scenarios (default: 8).")
    ] = None,
    steps: Steps = None,
    seeds: Seeds = None,
    global_batch_size: Samples = None,
    move_cost: Annotated[
        float, typer.Option(help="Cost of a claim, as a part of the best plan's step.")
    ] = 0.01,
    lengths: Lengths = None,
    padded: Padded = False,
    hidden_size: HiddenSize = None,
    jobs: Annotated[
        int | None, typer.Option(help="Number of processes (default: one per CPU).")
    ] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    png: Annotated[Path | None, typer.Option(help="Draw the table into this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a page with the table.")] = None,
) -> None:
    """Compare policies on simulated workers with the perfect-foresight oracle."""
    if png is not None and find_spec("matplotlib") is None:
        fail(f"`--png` needs matplotlib: `{install_line('demo')}`.", 1)
    import_from_here()
    drawn: dict[str, Any] = {
        "scenario": scenario,
        "world_size": world_size,
        "steps": steps,
        "seeds": seeds,
        "global_batch_size": global_batch_size,
    }
    if lengths is not None:
        by_count: dict[str, object] = {"--policy": policy, "--trace": trace, "--png": png}
        by_count |= {"--intercepts": intercepts, "--markdown": markdown}
        by_count |= {"--scheme": scheme if scheme != "bsp" else None}
        by_count |= {"--move-cost": move_cost if move_cost != 0.01 else None}
        ask = partial(length_cases, lengths, padded=padded, hidden_size=hidden_size, **drawn)
        _run_lengths(partial(ask, others=by_count), jobs, as_json_=as_json_)
        return
    try:
        check_lengths_alone("simulate", padded=padded, hidden_size=hidden_size)
        claimed: dict[str, Any] = {"scheme": scheme, "move_cost": move_cost, "jobs": jobs}
        contest = contest_of(
            **drawn, policy=policy, traces=trace or [], intercepts=intercepts, **claimed
        )
        _check_files(png, markdown)
    except ValueError as error:
        fail(str(error), 2)
    _run(contest, as_json_=as_json_, png=png, markdown=markdown)


def _run_lengths(ask: Callable[[], list[LengthCase]], jobs: int | None, *, as_json_: bool) -> None:
    """Compare ways to split samples of unlike lengths, and print it."""
    try:
        check_jobs(jobs)
        cases = ask()
        with Progress(len(cases)) as progress:
            runs = play_all(LengthCase.play, cases, jobs=jobs, tell=progress.step)
    except ValueError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("Stopped.", 130)
    width = terminal_width()
    answer = lengths_json(cases, runs)
    typer.echo(json.dumps(answer, indent=2) if as_json_ else lengths_text(cases, runs, width))


def _run(contest: Contest, *, as_json_: bool, png: Path | None, markdown: Path | None) -> None:
    """Run what was asked for, print it, and write the files."""
    try:
        with Progress(len(contest.tasks)) as progress:
            runs = play_all(play, contest.tasks, jobs=contest.jobs, tell=progress.step)
    except ValueError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("Stopped; nothing was written.", 130)
    board = Leaderboard(contest, tuple(runs))
    typer.echo(
        json.dumps(as_json(board), indent=2) if as_json_ else as_text(board, terminal_width())
    )
    try:
        if png is not None:
            from ._board_picture import save_picture

            save_picture(png, board)
        if markdown is not None:
            markdown.parent.mkdir(parents=True, exist_ok=True)
            page = as_markdown(board, png=png, page=markdown)
            markdown.write_text(page, encoding="utf-8", errors="replace")  # of a name in any bytes
    except OSError as error:
        fail(f"The table stands, but a file could not be written: {error}.", 1)


def _check_files(png: Path | None, markdown: Path | None) -> None:
    for option, file, suffix in (("--png", png, ".png"), ("--markdown", markdown, ".md")):
        if file is not None and (file.suffix != suffix or os.path.isdir(file)):
            raise refused(
                "simulate", option, f"name a file that ends in {suffix}", file, "Rename it."
            )
