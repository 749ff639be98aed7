"""The one reader of events: lines, a file that is complete, one that grows, and its newest run."""

from __future__ import annotations

import logging
import os
import stat
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, final, get_args

from msgspec import DecodeError, Struct, ValidationError
from msgspec.json import Decoder

from ..events import (
    SCHEMA_VERSION,
    Event,
    MemoryCapped,
    Rebalanced,
    RunStarted,
    StepMeasured,
    WaitingDiagnosed,
)
from ..exceptions import invalid

LONGEST_LINE = 1 << 22
"""Bytes of a line at most; a step of 10,000 ranks has half of that. A longer one is damaged."""

Line = bytes | None
"""Without its end; None for one that is longer than ``LONGEST_LINE``."""

_MOST_FOREIGN = 1000  # lines without a single event, after which a file is held for another's


_BY_CAUSE = ("causes", "ranks", "lost_share", "evidence", "remedy")
"""Tuples of ``WaitingDiagnosed``, with an entry for each cause instead of each rank."""

_NOT_BY_RANK = {*_BY_CAUSE, "versions"}
"""Tuples with other entries than one for each rank; ``ranks`` is one of ``LossNotFinite`` too."""


class _Head(Struct):
    """What every line has, whatever else is in it; the first one of a process has a version."""

    event: str
    version: Any = None


_HEAD = Decoder(_Head)
_KINDS: dict[str, Decoder[Any]] = {kind.__name__: Decoder(kind) for kind in get_args(Event)}
_BY_RANK = {
    kind: [
        field.name
        for field in fields(kind)
        if "tuple" in str(field.type) and field.name not in _NOT_BY_RANK
    ]
    for kind in get_args(Event)
}
"""Fields of each kind with an entry for each rank, or None in place of them all."""


class EventLines:
    """Reads lines in their order, and knows how many ranks they have to speak of.

    One policy for every reader. A damaged line is left out and counted, and the rest is used. An
    event of an unknown name is passed over, and so is an unknown field. A newer schema is an
    error, as fields may have other meanings there; so is a file in which nothing is an event.

    Args:
        name: the file, for errors.
        check: raises ValueError for an event that a reader has no use for, which is then left out
            as damaged.

    Attributes:
        num_lines: those that were read.
        num_known: of them, those that are no damage.
        num_damaged: lines that are no event, or one that cannot be.
        num_unknown: events that this version of evenstep does not know.
    """

    def __init__(self, name: str, *, check: Callable[[Event], None] | None = None) -> None:
        self._name, self._check = name, check
        self._world_size: int | None = None
        self.num_lines = self.num_known = self.num_damaged = self.num_unknown = 0
        self._first = ""  # damage, with its line

    @property
    def left_out(self) -> str:
        """What was not used, as a sentence; nothing where everything was used."""
        parts = []
        if self.num_damaged:
            lines = "line is" if self.num_damaged == 1 else "lines are"
            parts.append(f"{self.num_damaged} damaged {lines} left out ({self._first})")
        if self.num_unknown:
            events = "event is" if self.num_unknown == 1 else "events are"
            parts.append(f"{self.num_unknown} {events} of a kind unknown to this evenstep")
        return " and ".join(parts)

    def read(self, line: Line) -> Event | None:
        """Return the event of the next line; None where there is none, or none to use.

        Raises:
            ValueError: the lines are of a newer evenstep, or of something else than a run.
        """
        self.num_lines += 1
        if line is not None and not line.strip():
            return None
        try:
            text, head = _begun(line)
            event = self._event(text, head)
        except ValueError as error:
            self.num_damaged += 1
            self._first = self._first or f"line {self.num_lines}: {error}"
            if not self.num_known and self.num_damaged >= _MOST_FOREIGN:
                raise self._foreign() from None
            return None
        if head.event == "Schema" and head.version > SCHEMA_VERSION:
            raise ValueError(
                f"{self._name}, line {self.num_lines}: schema {head.version}, this evenstep reads "
                f"up to {SCHEMA_VERSION}. Upgrade evenstep."
            )
        self.num_known += 1
        return event

    def check_end(self) -> None:
        """Raise ValueError if there were lines, and none of them was an event."""
        if self.num_damaged and not self.num_known:
            raise self._foreign()

    def _foreign(self) -> ValueError:
        return ValueError(
            f"{self._name} must hold the events of a run, got none ({self._first}). Give "
            "the file `events.jsonl` of `Runtime(run_dir=...)`, unpacked."
        )

    def _event(self, text: str, head: _Head) -> Event | None:
        """Return the event of a line; None for an unknown name, and for the first line.

        Fields that this version does not know are passed over, as a newer one may have added them.
        Those that it has a default for may be missing.

        Raises:
            ValueError: a field is missing or cannot be what it says.
        """
        name = head.event
        if name == "Schema":
            if not isinstance(head.version, int):
                raise ValueError("`Schema(version=...)` must be an integer")
            self._world_size = None  # a process opened the file, maybe of another cluster
            return None
        if name not in _KINDS:
            self.num_unknown += 1
            return None
        try:
            event: Event = _KINDS[name].decode(text)
        except ValidationError as error:
            raise ValueError(f"`{name}(...)`: {error}") from None
        lengths = {len(getattr(event, field, ())) for field in _BY_CAUSE}
        if isinstance(event, WaitingDiagnosed) and len(lengths) > 1:
            raise ValueError("`WaitingDiagnosed` must have as many entries for each cause")
        known = event.world_size if isinstance(event, RunStarted) else self._world_size
        size = _checked_ranks(event, known)
        if self._check is not None:
            self._check(event)
        self._world_size = size
        return event


def _begun(line: Line) -> tuple[str, _Head]:
    """Return a line as text, and what every line has.

    Raises:
        ValueError: it is no event.
    """
    if line is None:
        raise ValueError(f"longer than {LONGEST_LINE >> 20} MiB")
    try:
        text = line.removeprefix(BOM_UTF8).decode()
        return text, _HEAD.decode(text)
    except UnicodeDecodeError:
        raise ValueError("no text in UTF-8") from None
    except ValidationError:
        raise ValueError("no event, an object with its name") from None
    except (DecodeError, RecursionError):  # the latter of what is nested deeply
        raise ValueError("no JSON") from None


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


_BUFFER = 1 << 20


@final
class EventFile(EventLines):
    """The events of a file that ``JsonLines`` wrote, to be iterated over once.

    A last line that was cut short is left out without a word: the run was killed, or is writing.

    Args:
        path: a run's folder, its ``events.jsonl``, or a pipe.
        check: raises ValueError for an event that is to be left out as damaged.
    """

    def __init__(self, path: str | Path, *, check: Callable[[Event], None] | None = None) -> None:
        self.path = events_file(path)
        super().__init__(str(self.path), check=check)

    def __iter__(self) -> Iterator[Event]:
        """Read the file; ``num_lines`` is the line of an event.

        Raises:
            ValueError: a newer evenstep wrote the file, or none did.
            OSError: the file cannot be read.
        """
        with self.path.open("rb", _BUFFER) as file:
            if stat.S_IFMT(os.fstat(file.fileno()).st_mode) not in (stat.S_IFREG, stat.S_IFIFO):
                # Such as ``/dev/zero``, which has no end.
                got, remedy = f"{self.path}", "Give a run's."
                raise invalid("EventFile(path=...)", "be a file or a pipe", got, remedy)
            for line in whole_lines(file):
                event = self.read(line)
                if event is not None:
                    yield event
        self.check_end()


def events_file(path: str | Path) -> Path:
    """Return the file of events in a run's folder; of a file, itself."""
    path = Path(path)
    return path / "events.jsonl" if path.is_dir() else path


def run_name(path: str | Path) -> str:
    """Return the name of a run: its folder's, or the file's where that is called otherwise."""
    file = events_file(path)
    name = file.absolute().parent.name if file.name == "events.jsonl" else file.stem
    return name.encode("utf-8", "replace").decode()  # of any bytes, and a page is text


def whole_lines(file: BinaryIO) -> Iterator[Line]:
    """Yield all lines of ``file`` without their ends, in constant memory.

    The last one counts without a newline if it ends as an object does: then it is whole.
    """
    while line := file.readline(LONGEST_LINE):
        if line.endswith(b"\n"):
            yield line[:-1]
        elif len(line) < LONGEST_LINE:
            if line.endswith(b"}") or not line.startswith(b"{"):
                yield line
            return
        else:
            while (line := file.readline(LONGEST_LINE)) and not line.endswith(b"\n"):
                pass
            yield None


_MARK = 256  # bytes: they hold times to the last digit, which no other step has


@final
class FollowedFile:
    """Yields whole lines of a growing file, some of them at a time.

    Every look opens the file anew and asks nothing of the system that a network disk does not
    have: neither notifications nor numbers of files. The last bytes that were read are compared
    at every look. Where they are others, or the file is shorter, it was replaced, and is read
    from its beginning. Memory is constant, whatever is in the file.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        """Bytes that were read, up to the end of a line. Where to continue, in another process
        too: see ``begin_at``."""
        self.num_replaced = 0
        self._mark = b""
        self._is_inside = False  # of a line whose beginning was passed over

    def begin_at(self, position: int) -> None:
        """Continue at any byte; if it is inside a line, the rest of that line is skipped."""
        self.position, self._mark = position, b""
        self._is_inside = position > 0
        if position:
            self.position -= 1  # where that is the end of a line, the next one is whole

    def read(self) -> Sequence[Line]:
        """Return the next lines; none where no whole one was added since the last call.

        Raises:
            OSError: the file cannot be read, or is not there.
        """
        with self.path.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.position - len(self._mark), 0))
            if size < self.position or file.read(len(self._mark)) != self._mark:
                self.begin_at(0)
                self.num_replaced += 1
                file.seek(0)
            return self._lines(file.read(LONGEST_LINE) or b"")

    def _lines(self, block: bytes) -> Sequence[Line]:
        end = block.rfind(b"\n") + 1
        if not end and len(block) < LONGEST_LINE:
            return ()
        was_inside, self._is_inside = self._is_inside, not end
        block = block[:end] or block
        self.position += len(block)
        self._mark = (self._mark + block)[-_MARK:]
        if not end:
            return () if was_inside else (None,)
        lines = block[:-1].split(b"\n")
        return lines[1:] if was_inside else lines


WARM_UP = 1
"""Steps at the start that readers pass over, as training does: kernels are chosen, memory is found.
"""
MOST_STEPS = 20_000
"""The newest steps that are kept, at most: 64 ranks take 200 MB for them."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a file of events says of the run that began last in it.

    Attributes:
        file: the file.
        start: its ``RunStarted``; None where that was not recorded.
        steps: the newest ``StepMeasured``, each with the line that says so, at least one, all of
            as many workers, with times and sizes that can be.
        caps: the last known largest batch of a rank, where there was one. Empty in a loop that
            takes micro-batches: what is known there bounds one forward.
    """

    file: Path
    start: RunStarted | None
    steps: list[tuple[int, StepMeasured]]
    caps: dict[int, int]

    @classmethod
    def of(cls, path: str | Path, *, caller: str) -> Recorded:
        """Return what a run's folder, or its ``events.jsonl``, says.

        From the last start in the file on, if training began more than once: earlier workers may
        have been others. What is damaged is left out, with a warning of the logger ``evenstep``.

        Args:
            path: the folder or the file.
            caller: the function that was given it, for errors.

        Raises:
            ValueError: there is no measured step, or nothing is an event.
            OSError: the file cannot be read.
        """
        start: RunStarted | None = None
        steps: deque[tuple[int, StepMeasured]] = deque(maxlen=MOST_STEPS)
        caps: dict[int, int] | None = {}
        events = EventFile(path, check=_check)
        try:
            for event in events:
                match event:
                    case RunStarted():
                        start, caps = event, {}
                        steps.clear()
                    case StepMeasured():
                        steps.append((events.num_lines, event))
                    case MemoryCapped() | Rebalanced():
                        caps = _caps_after(event, caps)
        except ValueError as error:
            raise ValueError(f"`{caller}(path=...)`: {error}") from error
        file, left_out = events.path, events.left_out
        if not steps:
            got = f"none in {file}" + (f" ({left_out})" if left_out else "")
            remedy = "Train with `Runtime(run_dir=...)`, a few steps are enough."
            raise invalid(f"{caller}(path=...)", "hold a measured step", got, remedy)
        if left_out:
            logging.getLogger("evenstep").warning("%s: %s. The rest is used.", file, left_out)
        return cls(file, start, list(steps), caps or {})

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step; those of the newest step where no start was recorded."""
        if self.start is None:
            return sum(self.steps[-1][1].batch_size)
        return self.start.global_batch_size


def _caps_after(
    event: MemoryCapped | Rebalanced, caps: dict[int, int] | None
) -> dict[int, int] | None:
    """Return the caps of local batches; None once they are known to bound one forward only."""
    if isinstance(event, Rebalanced):
        return caps if event.max_forward is None else None
    if caps is None or event.unit != "samples":
        return caps
    return {**caps, event.rank: event.max_batch_size}


def _check(event: Event) -> None:
    """Raise for a step in which a worker computed in no time, of which nothing can be learnt."""
    if not isinstance(event, StepMeasured):
        return
    for rank, (size, second) in enumerate(zip(event.batch_size, event.compute_s, strict=True)):
        if size and not second > 0:
            name = "`StepMeasured(compute_s=...)`"
            raise ValueError(f"{name} must be positive for {size} samples, got 0 of rank {rank}")
