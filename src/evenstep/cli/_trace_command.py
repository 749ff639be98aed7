"""``evenstep trace``: a recorded run as a file for Perfetto."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from .._telemetry import read_events
from .._telemetry._chrome_trace import ALIGNMENT, ChromeTrace
from .._telemetry._event_file import events_file
from .._whole_file import write_whole
from ..events import to_record
from ._common import fail, refused, spare, unread, unwritten

Run = Annotated[Path, typer.Argument(help="A recorded run's folder, or its events.jsonl.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The file (default: trace.json beside the events)."),
]
Steps = Annotated[
    str | None, typer.Option(help="Steps to draw, such as 1000-1999 or 1000- (default: all).")
]


def trace(run: Run, output: Output = None, steps: Steps = None) -> None:
    """Write where each step's time went, on every rank, as a trace for ui.perfetto.dev."""
    drawing = ChromeTrace(_range(steps))
    try:
        events = _events(run)
        file = output or events.with_name("trace.json")
        spare("trace", events, file, example="trace.json")
        records = _records(events)
        first = list(islice(records, 1))  # before the other file is begun
        write_whole(file, _pieces(drawing.of(chain(first, records))))
    except OSError as error:
        fail(str(unwritten("trace", file, error, example="trace.json")), 2)
    except ValueError as error:
        fail(str(error), 2)
    if drawing.drawn is None:
        fail(f"{file} holds no step: none of those asked for was measured in {events}.", 1)
    first_step, last_step = drawing.drawn
    size = file.stat().st_size / 1e6
    typer.echo(
        f"{file}: steps {first_step} to {last_step}, {size:.1f} MB. Open it in https://ui.perfetto.dev"
    )


def _events(run: Path) -> Path:
    try:
        return events_file(run)
    except OSError as error:  # of a name that is too long
        raise unread("trace", "RUN", run, error) from error


def _records(events: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run."""
    try:
        yield from map(to_record, read_events(events))
    except OSError as error:
        raise unread("trace", "RUN", events, error) from error


def _pieces(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the text of the trace, event by event."""
    head = json.dumps({"displayTimeUnit": "ms", "otherData": {"alignment": ALIGNMENT}})
    yield head[:-1] + ', "traceEvents": ['
    between = "\n"
    for event in events:
        yield between + json.dumps(event, separators=(",", ":"))
        between = ",\n"
    yield "\n]}\n"


def _range(text: str | None) -> range | None:
    """Return the steps that the option names."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,18})(-(\d{0,18}))?", text.strip())
    if found is None or (found[3] and int(found[3]) < int(found[1])):
        rule, remedy = "name steps", "Examples are 1000-1999, 1000- and 1000."
        fail(str(refused("trace", "--steps", rule, repr(text), remedy)), 2)
    first = int(found[1])
    if found[2] is None:
        return range(first, first + 1)
    return range(first, int(found[3]) + 1 if found[3] else 2**62)
