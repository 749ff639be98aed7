"""The commands on a run: ``evenstep watch``, ``evenstep top`` and ``evenstep report``."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from .._report import ReportFigures, page, read_figures
from .._telemetry._event_lines import events_file
from .._top import FileSource, Source, StreamSource, TopView
from .._top import watch as follow
from .._top._run_sources import quit_key
from .._whole_file import write_whole
from ._common import check_ends, fail, spare, unread, unwritten, within


def watch(
    command: Annotated[
        list[str],
        typer.Argument(help="The command that starts the training, such as torchrun ... train.py."),
    ],
    every: Annotated[
        float, typer.Option(help="Seconds between two lines on standard error; 0 writes none.")
    ] = 10.0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for rank 0's events, which `report` and `top` read.")
    ] = None,
) -> None:
    """Run a training unchanged, and say which ranks wait for which, and why."""
    from ..watch._start_watch import run

    try:
        status = run(command, every_s=every, run_dir="" if run_dir is None else str(run_dir))
    except ValueError as error:
        fail(str(error), 2)
    raise typer.Exit(status)


def top(
    run: Annotated[
        str, typer.Argument(help="A run's folder, its events.jsonl, or - for standard input.")
    ],
    refresh: Annotated[float, typer.Option(help="Seconds from one view to the next.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view of all ranks.")] = False,
) -> None:
    """Follow a run: its ranks, and which of them the others wait for, and why; q ends it.

    With - it reads events from standard input, such as those of another machine.
    """
    console = Console(highlight=False)
    try:
        within("top", "--refresh", refresh, 0.1, 3600, "1 second is a good pace.")
        source = _source(run)
        if once or not console.is_terminal or console.is_dumb_terminal:
            console.print(_now(source, run))
            return
        with suppress(KeyboardInterrupt), quit_key() as wait:
            follow(source, console, title=run, refresh_s=refresh, wait=wait)
        # What is left on the screen.
        console.print(TopView(source.run, run, source.remark, source.silent_s))
    except OSError as error:
        fail(str(unread("top", "RUN", run, error)), 2)
    except ValueError as error:
        fail(str(error), 2)


def _source(run: str) -> Source:
    if run == "-":
        return StreamSource(os.fdopen(os.dup(0), "rb"))
    check_ends("top", "RUN", Path(run), "Give what `Runtime(run_dir=...)` was given.")
    return FileSource(Path(run))


def _now(source: Source, run: str) -> TopView:
    """Return a view of all that is there by now."""
    while not source.is_over:
        if not source.update(within_s=1.0) and isinstance(source, FileSource):
            break  # it is read up to its end, and a stream ends by itself
    return TopView(source.run, run, source.remark, source.silent_s, fits=False)


Run = Annotated[
    Path,
    typer.Argument(help="A recorded run's folder, or its events.jsonl.", metavar="RUN"),
]
Other = Annotated[
    Path | None, typer.Option("--compare", help="Another run, shown beside it.", metavar="RUN2")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The page (default: report.html in the run's folder)."),
]


def report(run: Run, compare: Other = None, output: Output = None) -> None:
    """Write one HTML page about a recorded run. The page needs no network and no server."""
    path = output or (run if os.path.isdir(run) else run.parent) / "report.html"
    try:
        runs = [_read(run, "RUN")] + ([] if compare is None else [_read(compare, "--compare")])
        for read in filter(None, (run, compare)):
            spare("report", events_file(read), path, example="report.html")
        made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
        text = page(runs, version=__version__, made=made)
        _write(path, text)
    except ValueError as error:
        fail(str(error), 2)
    for one in runs:
        if one.left_out:
            typer.echo(f"{one.name}: {one.left_out}.", err=True)
    typer.echo(f"{path} ({len(text.encode()) / 1e6:.1f} MB)")


def _read(run: Path, argument: str) -> ReportFigures:
    try:
        return read_figures(run)
    except OSError as error:
        raise unread("report", argument, run, error) from error


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, [text])
    except OSError as error:
        raise unwritten("report", path, error, example="report.html") from error
