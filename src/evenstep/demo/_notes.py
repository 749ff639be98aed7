"""What a run of the demo writes down beside evenstep's own events, one JSON object per line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Notebook:
    """Appends records to ``notes.jsonl``, on rank 0; on other ranks it writes nothing.

    Args:
        run_dir: the run's folder, or None to write nothing.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self._path = None if run_dir is None else run_dir / "notes.jsonl"

    def write(self, name: str, **fields: Any) -> None:
        """Append one record, complete on disk when this returns."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"event": name, **fields}) + "\n")


class Tail:
    """Reads a file of JSON lines while another process writes it.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the records completed since the last call; a line half written waits."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]
