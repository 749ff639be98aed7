"""``evenstep report``: a recorded run, or two of them, as one page."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from .._report import ReportFigures, page, read_figures
from .._telemetry._event_lines import events_file
from .._whole_file import write_whole
from ._common import fail, spare, unread, unwritten

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
