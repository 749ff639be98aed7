"""``evenstep watch``: which ranks of a training wait for which, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._common import fail


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
