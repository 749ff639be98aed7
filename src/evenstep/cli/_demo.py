"""``evenstep demo``: equal shares against balanced ones, live."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from .._install import install_line
from ._common import fail, import_from_here, numbers, refused

_NEEDED = ("torch", "matplotlib")


def demo(
    workers: Annotated[
        int | None, typer.Option(help="Number of worker processes (default: 4, or one per GPU).")
    ] = None,
    speeds: Annotated[
        str | None, typer.Option(help="Emulated speeds, one per worker, such as 1,1/2,1/3,1/6.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="The balanced run's policy: a name, or module:Class (also in this folder)."
        ),
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda; auto takes GPUs if there are two or more.")
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

    from ..demo._launch import DemoFailed
    from ..demo._run_demo import run_demo
    from ..demo._settings import choose

    if ":" in policy:
        import_from_here()
    try:
        settings = choose(
            workers=workers,
            speeds=None if speeds is None else numbers("demo", "--speeds", speeds),
            policy=policy,
            device=device,
            steps=steps,
            out=out,
            count_cards=_count_cards,
        )
    except ValueError as error:
        fail(str(error), 2)

    _end_by_signals()
    console = Console()
    try:
        run_demo(settings, console)
    except DemoFailed as error:
        fail(str(error), 1)
    except OSError as error:  # a folder that cannot be written, or a full disk
        fail(_unwritten(out, error), 1)
    except KeyboardInterrupt:
        console.print("\nStopped; all workers have ended.")
        raise typer.Exit(130) from None


def _unwritten(out: Path, error: OSError) -> str:
    got = f"{error.filename or out} ({error.strerror or error})"
    remedy = "Give another one: `--out runs/demo`."
    return str(refused("demo", "--out", "be a folder to write in", got, remedy))


def _count_cards() -> int:
    import torch

    return torch.cuda.device_count()


def _end_by_signals() -> None:
    """Have signals that end this process end the workers too, on the way out."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
