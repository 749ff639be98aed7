"""Lines of a file of events, read one by one: what is damaged is left out, and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from ..events import SCHEMA_VERSION, Event, RunStarted
from ._from_record import check_ranks, from_record, world_size_of

LONGEST_LINE = 1 << 22
"""Bytes of a line at most; a step of 10,000 ranks has half of that. A longer one is damaged."""

Line = bytes | None
"""Without its end; None for one that is longer than ``LONGEST_LINE``."""

_MOST_FOREIGN = 1000  # lines without a single event, after which a file is held for another's


class _NewerSchemaError(ValueError):
    """Fields may have other meanings: no line after this one can be read."""


@dataclass(slots=True)
class LeftOut:
    """What of a file was not used.

    Attributes:
        num_damaged: lines that are no event, or one that cannot be.
        num_unknown: events that this version of evenstep does not know.
        first: the first damage, with its line.
    """

    num_damaged: int = 0
    num_unknown: int = 0
    first: str = ""

    def __str__(self) -> str:
        """Return it as a sentence; nothing where everything was used."""
        told = []
        if self.num_damaged:
            lines = "line is" if self.num_damaged == 1 else "lines are"
            told.append(f"{self.num_damaged} damaged {lines} left out ({self.first})")
        if self.num_unknown:
            events = "event is" if self.num_unknown == 1 else "events are"
            told.append(f"{self.num_unknown} {events} of a kind unknown to this evenstep")
        return " and ".join(told)


@final
class EventLines:
    """Reads lines in their order, and knows how many ranks they have to speak of.

    One policy for every reader. A damaged line is left out and counted, and the rest is used. An
    event of an unknown name is passed over, and so is an unknown field. A newer schema is an
    error, as fields may have other meanings there; so is a file in which nothing is an event.

    Args:
        name: the file, for errors.
        wanted: names of the events to read; None is all. A line of another kind is passed over
            unread, which is several times as fast.
        check: raises ValueError for an event that a reader has no use for, which is then left out
            as damaged.
    """

    def __init__(
        self,
        name: str,
        *,
        wanted: frozenset[str] | None = None,
        check: Callable[[Event], None] | None = None,
    ) -> None:
        self._name, self._check = name, check
        self._wanted = None if wanted is None else wanted | {RunStarted.__name__}
        self._world_size: int | None = None
        self.left_out = LeftOut()
        self.num_lines = 0
        self.num_known = 0

    def read(self, line: Line) -> Event | None:
        """Return the event of the next line; None where there is none, or none to use.

        Raises:
            ValueError: the lines are of a newer evenstep, or of something else than a run.
        """
        self.num_lines += 1
        if line is not None and (not line.strip() or self._is_unwanted(line)):
            return None
        try:
            event = self._event(line)
        except _NewerSchemaError:
            raise
        except ValueError as error:
            self.damaged(str(error))
            return None
        self.num_known += 1
        return event

    def damaged(self, problem: str) -> None:
        """Count the newest line as left out."""
        left_out = self.left_out
        left_out.num_damaged += 1
        left_out.first = left_out.first or f"line {self.num_lines}: {problem}"
        if not self.num_known and left_out.num_damaged >= _MOST_FOREIGN:
            raise self._foreign()

    def check_end(self) -> None:
        """Raise ValueError if there were lines, and none of them was an event."""
        if self.left_out.num_damaged and not self.num_known:
            raise self._foreign()

    def _foreign(self) -> ValueError:
        return ValueError(
            f"{self._name} must hold the events of a run, got none ({self.left_out.first}). Give "
            "the file `events.jsonl` of `Runtime(run_dir=...)`, unpacked."
        )

    def _is_unwanted(self, line: bytes) -> bool:
        """Tell whether ``line`` begins as one of another kind, written by ``JsonLines``."""
        if self._wanted is None or not line.startswith(b'{"event": "'):
            return False
        name = line[11 : line.find(b'"', 11)]
        known = name.isalnum() and name.decode() in self._wanted
        if not known and name != b"Schema":
            self.num_known += 1
            return True
        return False

    def _event(self, line: Line) -> Event | None:
        record = _record(line)
        if record["event"] == "Schema":
            self._check_schema(record.get("version"))
            self._world_size = None  # a process opened the file, maybe of another cluster
            return None
        event = from_record(record)
        if event is None:
            self.left_out.num_unknown += 1
            return None
        if isinstance(event, RunStarted):
            _check_start(event)
        known = None if isinstance(event, RunStarted) else self._world_size
        size = world_size_of(event) if known is None else known
        if size is not None:
            check_ranks(event, size)
        if self._check is not None:
            self._check(event)
        self._world_size = size
        return event

    def _check_schema(self, version: Any) -> None:
        if type(version) is not int:
            raise ValueError(f"a schema of version {version!r}")
        if version > SCHEMA_VERSION:
            raise _NewerSchemaError(
                f"{self._name}, line {self.num_lines}: schema {version}, this evenstep reads up "
                f"to {SCHEMA_VERSION}. Upgrade evenstep."
            )


def _record(line: Line) -> dict[str, Any]:
    if line is None:
        raise ValueError(f"longer than {LONGEST_LINE >> 20} MiB")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError("no text in UTF-8") from None
    except (ValueError, RecursionError):  # with numbers of thousands of digits, or nested deeply
        raise ValueError("no JSON") from None
    if not (isinstance(record, dict) and isinstance(record.get("event"), str)):
        raise ValueError("no event, an object with its name")
    return record


def _check_start(event: RunStarted) -> None:
    if event.world_size < 1 or event.global_batch_size < 1:
        got = f"{event.world_size} and {event.global_batch_size}"
        raise ValueError(f"`RunStarted` must have ranks and samples, got {got}")
