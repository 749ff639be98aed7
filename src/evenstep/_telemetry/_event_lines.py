"""Lines of a file of events, read one by one: what is damaged is left out, and counted."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, final, get_args

from msgspec import DecodeError, Struct, ValidationError
from msgspec.json import Decoder

from ..events import SCHEMA_VERSION, Event, RunStarted, WaitingDiagnosed

LONGEST_LINE = 1 << 22
"""Bytes of a line at most; a step of 10,000 ranks has half of that. A longer one is damaged."""

Line = bytes | None
"""Without its end; None for one that is longer than ``LONGEST_LINE``."""

_MOST_FOREIGN = 1000  # lines without a single event, after which a file is held for another's


_BY_CAUSE = ("causes", "ranks", "lost_share", "evidence", "remedy")
"""Tuples of ``WaitingDiagnosed``, with an entry for each cause instead of each rank."""

_NOT_BY_RANK = {*_BY_CAUSE, "versions"}
"""Tuples with other entries than one for each rank; ``ranks`` is one of ``LossNotFinite`` too."""


class _Named(Struct):
    """What every line has, whatever else is in it."""

    event: str


class _Schema(Struct):
    """The first line of a process."""

    version: int


_KINDS: dict[str, Decoder[Any]] = {
    "Schema": Decoder(_Schema),
    **{kind.__name__: Decoder(kind) for kind in get_args(Event)},
}
_NAMED = Decoder(_Named)
_BY_RANK = {
    kind: [
        field.name
        for field in fields(kind)
        if "tuple" in str(field.type) and field.name not in _NOT_BY_RANK
    ]
    for kind in get_args(Event)
}
"""Fields of each kind with an entry for each rank, or None in place of them all."""


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
        event = _decoded(line)
        if event is None:
            self.left_out.num_unknown += 1
            return None
        if isinstance(event, _Schema):
            self._check_schema(event.version)
            self._world_size = None  # a process opened the file, maybe of another cluster
            return None
        if type(event) is WaitingDiagnosed and not _is_even(event):
            raise ValueError("`WaitingDiagnosed` must have as many entries for each cause")
        known = event.world_size if isinstance(event, RunStarted) else self._world_size
        size = _checked_ranks(event, known)
        if self._check is not None:
            self._check(event)
        self._world_size = size
        return event

    def _check_schema(self, version: int) -> None:
        if version > SCHEMA_VERSION:
            raise _NewerSchemaError(
                f"{self._name}, line {self.num_lines}: schema {version}, this evenstep reads up "
                f"to {SCHEMA_VERSION}. Upgrade evenstep."
            )


def _decoded(line: Line) -> Event | _Schema | None:
    """Return what a line says; None for an unknown name.

    Fields that this version does not know are passed over, as a newer one may have added them.
    Those that it has a default for may be missing.

    Raises:
        ValueError: it is no event, or a field is missing or cannot be what it says.
    """
    if line is None:
        raise ValueError(f"longer than {LONGEST_LINE >> 20} MiB")
    try:
        text = line.removeprefix(BOM_UTF8).decode()
        name = _NAMED.decode(text).event
    except UnicodeDecodeError:
        raise ValueError("no text in UTF-8") from None
    except ValidationError:
        raise ValueError("no event, an object with its name") from None
    except (DecodeError, RecursionError):  # the latter of what is nested deeply
        raise ValueError("no JSON") from None
    if name not in _KINDS:
        return None
    try:
        return _KINDS[name].decode(text)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise ValueError(f"`{name}(...)`: {error}") from None


def _is_even(event: WaitingDiagnosed) -> bool:
    return len({len(getattr(event, field)) for field in _BY_CAUSE}) == 1


def _checked_ranks(event: Event, world_size: int | None) -> int | None:
    """Return of how many ranks ``event`` speaks: as many as known before, if that is not None.

    Raises:
        ValueError: it cannot be an event of so many ranks, at least one.
    """
    name = type(event).__name__
    for field in _BY_RANK[type(event)]:
        values = getattr(event, field)
        if values is None:
            continue
        if world_size is None:
            world_size = len(values)
        if len(values) != world_size or not values:
            must = f"`{name}({field}=...)` must speak of {world_size or 'some'} ranks"
            raise ValueError(f"{must}, got {len(values)}")
    if world_size is None:
        return None
    rank = getattr(event, "rank", None)
    least = -1 if isinstance(event, WaitingDiagnosed) else 0
    for each in getattr(event, "ranks", ()) if rank is None else (rank,):
        if not least <= each < world_size:
            raise ValueError(f"`{name}(rank=...)` must name ranks below {world_size}, got {each}")
    return world_size
