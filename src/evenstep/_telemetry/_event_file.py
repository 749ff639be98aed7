"""The events of a file that is complete, in their order: the good part of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, final

from ..events import Event
from ..exceptions import invalid
from ._event_lines import LONGEST_LINE, EventLines, LeftOut, Line

_BUFFER = 1 << 20


@final
class EventFile:
    """Yields the events of a file that ``JsonLines`` wrote, each with its line, from 1.

    Damaged lines are left out and counted (``EventLines`` has the rules). A last line that was cut
    short is left out without a word: the run was killed, or is writing.

    Args:
        path: a run's folder, its ``events.jsonl``, or a pipe.
        wanted: names of the events to yield, besides ``RunStarted``; None is all.
        check: raises ValueError for an event that is to be left out as damaged.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        wanted: frozenset[str] | None = None,
        check: Callable[[Event], None] | None = None,
    ) -> None:
        self.path = events_file(path)
        self._wanted, self._check = wanted, check
        self.left_out = LeftOut()

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        """Read the file from its beginning.

        Raises:
            ValueError: a newer evenstep wrote the file, or none did.
            OSError: the file cannot be read.
        """
        lines = EventLines(str(self.path), wanted=self._wanted, check=self._check)
        self.left_out = lines.left_out
        with self.path.open("rb", _BUFFER) as file:
            _check_kind(file, self.path)
            for line in whole_lines(file):
                event = lines.read(line)
                if event is not None:
                    yield lines.num_lines, event
        lines.check_end()


def events_file(path: str | Path) -> Path:
    """Return the file of events in a run's folder; of a file, itself."""
    path = Path(path)
    return path / "events.jsonl" if path.is_dir() else path


def read_events(path: str | Path) -> Iterator[Event]:
    """Yield the events of a run's folder or file; ``EventFile`` has the rules."""
    return (event for _, event in EventFile(path))


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


def _check_kind(file: BinaryIO, path: Path) -> None:
    """Refuse what has no end, such as ``/dev/zero``."""
    if stat.S_IFMT(os.fstat(file.fileno()).st_mode) not in (stat.S_IFREG, stat.S_IFIFO):
        raise invalid("EventFile(path=...)", "be a file or a pipe", f"{path}", "Give a run's.")
