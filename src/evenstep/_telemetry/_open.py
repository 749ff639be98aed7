"""Where the events of a run go, in any framework: its file, its progress line, the user's hooks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path

from ..events import Hook
from ._jsonl import JsonLines
from ._line import ProgressLine
from ._news import FaultLog
from ._outlet import Fanout, Outlet


def open_outlets(
    run_dir: str | Path | None, *, line_every: int | None, hooks: Iterable[Hook]
) -> list[Outlet]:
    """Return where rank 0's events go, not yet started.

    Args:
        run_dir: folder for ``events.jsonl``; None writes none. A folder that cannot be written to
            is a warning: training goes on without.
        line_every: steps between two progress lines on standard error; None is faults alone.
        hooks: the user's own.
    """
    outlets = []
    if run_dir is not None and (file := _open_file(Path(run_dir))) is not None:
        outlets.append(Outlet(file, finish=file.close))
    line = [] if line_every is None else [ProgressLine(sys.stderr, line_every)]
    outlets.append(Outlet(Fanout((FaultLog(), *line)), name="standard error"))
    return outlets + [Outlet(hook) for hook in hooks]


def _open_file(run_dir: Path) -> JsonLines | None:
    """Open the file of events, or say why there will be none."""
    try:
        return JsonLines(run_dir / "events.jsonl")
    except OSError as error:
        logging.getLogger("evenstep").warning(
            "No events are written to %s (%s); training continues. Give `Runtime(run_dir=...)` a "
            "folder of its own that rank 0 can write to.",
            run_dir,
            error,
        )
        return None
