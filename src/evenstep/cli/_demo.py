"""``evenstep demo``: equal shares against balanced ones, live."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .._install import install_line
from ..policies import by_name
from ._common import fail, import_from_here, least, numbers, refused

_NEEDED = ("torch", "matplotlib")
_MOST_WORKERS = 256


def demo(
    speeds: Annotated[str, typer.Option(help="Emulated speeds, one per worker.")] = "1,1/2,1/3,1/6",
    policy: Annotated[
        str,
        typer.Option(
            help="The balanced run's policy: a name, or module:Class (also in this folder)."
        ),
    ] = "auto",
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each run (default: as many as fit in about a minute)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for picture, figures and events.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train a small GPT with equal shares, then balanced, and show the difference."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        fail(f"The demo needs {' and '.join(missing)}: `{install_line('demo')}`.", 1)

    from ..demo._run_demo import RUNS, DemoFailed, run_demo
    from ..demo._worker import DemoJob

    if ":" in policy:
        import_from_here()
    try:
        given = numbers("demo", "--speeds", speeds)
        if not 2 <= len(given) <= _MOST_WORKERS:
            rule, remedy = f"name 2 to {_MOST_WORKERS} workers", "Write 1,1/2,1/3 say."
            raise refused("demo", "--speeds", rule, len(given), remedy)
        if steps is not None:
            least("demo", "--steps", steps, 10, "Fewer show nothing.")
        by_name(policy)
        _check_out(out, RUNS)
    except ValueError as error:
        fail(str(error), 2)

    # `with` ends the workers on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run_demo(DemoJob(policy, given, steps), out, Console())
    except DemoFailed as error:
        fail(str(error), 1)
    except OSError as error:  # a folder that cannot be written, or a full disk
        got = f"{error.filename or out} ({error.strerror or error})"
        remedy = "Give another one: `--out runs/demo`."
        fail(str(refused("demo", "--out", "be a folder to write in", got, remedy)), 1)


def _check_out(out: Path, runs: tuple[str, ...]) -> None:
    """Refuse a folder in which a run would replace what no demo has made."""
    for folder in (out / name for name in runs):
        if os.path.exists(folder) and not os.path.isfile(folder / "job.json"):
            remedy = "Its runs are written there: give another folder."
            rule = f"hold no `{folder.name}` of another making"
            raise refused("demo", "--out", rule, folder, remedy)
