"""Labs in which the network's benchmark runs its jobs."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks._common import Row
from evenstep.lab import Change, Host, Lab, LabUnavailable


def no_lab() -> Row | None:
    """Return the row that says why no lab can be made here; None where one can."""
    try:
        with Lab([Host()]):
            return None
    except LabUnavailable as error:
        return Row(what="a lab", bar="Linux and root", measured={"none here": str(error)})


def in_lab(
    mbit: Sequence[float | None], settings: dict[str, Any], *, trace: Sequence[Change] = ()
) -> dict[str, Any]:
    """Return what rank 0 answered of a job on hosts with such links.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder, Lab([Host(mbit=rate) for rate in mbit]) as lab:
        asked, answer = Path(folder) / "asked.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps({**settings, "began_s": monotonic()}), encoding="utf-8")
        command = ["-m", "benchmarks._network_run", str(asked), str(answer)]
        lines: list[str] = []  # agents that leave one by one complain: of interest on failure alone
        code = lab.torchrun(command, trace=trace, write=lines.append)
        if code:
            print("\n".join(lines), file=sys.stderr, flush=True)
            raise RuntimeError(f"The job {settings['job']!r} ended with {code}; see above.")
        told: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return told
