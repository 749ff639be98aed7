"""``evenstep top``: a run in the terminal, while it goes on."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .._top import FileSource, Source, StreamSource, TopView, watch
from .._top._run_sources import quit_key
from ._common import check_ends, fail, unread, within


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
            watch(source, console, title=run, refresh_s=refresh, wait=wait)
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
