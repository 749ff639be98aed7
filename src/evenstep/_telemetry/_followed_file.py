"""A file of lines that another process writes, read as it grows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import final

from ._event_lines import LONGEST_LINE, Line

_BLOCK = 1 << 18
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
        """Bytes that were read, up to the end of a line. Where to go on from, in another process
        too: see ``begin_at``."""
        self.num_replaced = 0
        self._mark = b""
        self._is_inside = False  # of a line whose beginning was passed over

    def begin_at(self, position: int) -> None:
        """Go on at any byte; a line that it is in the middle of is passed over."""
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
            block = file.read(_BLOCK) or b""
            while b"\n" not in block and len(block) < LONGEST_LINE:
                more = file.read(_BLOCK)
                if not more:
                    break
                block += more
        return self._lines(block)

    def _lines(self, block: bytes) -> Sequence[Line]:
        end = block.rfind(b"\n") + 1
        was_inside, is_too_long = self._is_inside, not end and len(block) >= LONGEST_LINE
        if is_too_long:
            self._is_inside = True
            self._pass(block)
            return () if was_inside else (None,)
        if not end:
            return ()
        self._is_inside = False
        self._pass(block[:end])
        lines = block[: end - 1].split(b"\n")
        return lines[1:] if was_inside else lines

    def _pass(self, block: bytes) -> None:
        self.position += len(block)
        self._mark = (self._mark + block)[-_MARK:]
