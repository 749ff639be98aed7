"""``evenstep trace``: a recorded run as a file for Perfetto."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from .._telemetry import read_events
from .._telemetry._chrome_trace import ALIGNMENT, ChromeTrace
from ..events import to_record
from ._common import fail, refused

Run = Annotated[
    Path, typer.Argument(help="A run's folder, Runtime(run_dir=...), or its events.jsonl.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The file; trace.json beside the events.")
]
Steps = Annotated[
    str | None, typer.Option(help="Steps to draw, such as 1000-1999 or 1000-; all of them.")
]


def trace(run: Run, output: Output = None, steps: Steps = None) -> None:
    """Write where each step's time went, on every rank, as a trace for ui.perfetto.dev."""
    events = run / "events.jsonl" if run.is_dir() else run
    file = output or events.with_name("trace.json")
    drawing = ChromeTrace(_range(steps))
    try:
        if file.resolve() == events.resolve():
            rule = "name another file than the events"
            raise refused("trace", "--output", rule, file, "Leave it out for `trace.json`.")
        with events.open("rb"):  # before the other file is begun
            pass
        _write(file, drawing.of(map(to_record, read_events(events))))
    except (OSError, ValueError) as error:
        fail(str(error), 2)
    if drawing.drawn is None:
        fail(f"{file} holds no step: none of those asked for was measured in {events}.", 1)
    first, last = drawing.drawn
    size = file.stat().st_size / 1e6
    typer.echo(
        f"{file}: steps {first} to {last}, {size:.1f} MB. Open it in https://ui.perfetto.dev"
    )


def _write(file: Path, events: Iterable[dict[str, Any]]) -> None:
    """Write the trace, event by event."""
    head = json.dumps({"displayTimeUnit": "ms", "otherData": {"alignment": ALIGNMENT}})
    with file.open("w", encoding="utf-8") as out:
        out.write(head[:-1] + ', "traceEvents": [')
        between = "\n"
        for event in events:
            out.write(between + json.dumps(event, separators=(",", ":")))
            between = ",\n"
        out.write("\n]}\n")


def _range(text: str | None) -> range | None:
    """Return the steps that the option names."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(-(\d*))?", text.strip())
    if found is None or (found[3] and int(found[3]) < int(found[1])):
        rule, remedy = "name steps", "Examples are 1000-1999, 1000- and 1000."
        fail(str(refused("trace", "--steps", rule, repr(text), remedy)), 2)
    first = int(found[1])
    if found[2] is None:
        return range(first, first + 1)
    return range(first, int(found[3]) + 1 if found[3] else 2**62)
