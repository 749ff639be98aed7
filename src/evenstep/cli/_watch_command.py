"""``evenstep watch``: who waits for whom in a training, and why; the script stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._common import fail


def watch(
    command: Annotated[
        list[str], typer.Argument(help="What starts the training: torchrun ... train.py.")
    ],
    every: Annotated[
        float, typer.Option(help="Seconds between two lines on standard error; 0: none.")
    ] = 10.0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for rank 0's events, for report and top.")
    ] = None,
) -> None:
    """Run a training and say who waits for whom in it, and why. Nothing in it changes."""
    from ..watch._start_watch import run

    try:
        status = run(command, every_s=every, run_dir="" if run_dir is None else str(run_dir))
    except ValueError as error:
        fail(str(error), 2)
    raise typer.Exit(status)
