"""The newest run in a file of events: who trained, and the steps that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from ..exceptions import invalid
from ._jsonl import numbered_events

Record = dict[str, Any]

WARM_UP = 1
"""Steps at the start that readers pass over, as training does: kernels are chosen, memory is found.
"""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a file of events says of the run that began last in it.

    Attributes:
        file: the file.
        start: its ``RunStarted``; None where that was not recorded.
        steps: every ``StepMeasured`` with the line that says so, at least one, all of as many
            workers, with times and sizes that can be.
        caps: the last known largest batch of a rank, where there was one.
    """

    file: Path
    start: Record | None
    steps: list[tuple[int, Record]]
    caps: dict[int, int]

    @classmethod
    def of(cls, path: str | Path, *, caller: str) -> Recorded:
        """Return what a run's folder, or its ``events.jsonl``, says.

        From the last start in the file on, if training began more than once: earlier workers may
        have been others.

        Args:
            path: the folder or the file.
            caller: the function that was given it, for errors.

        Raises:
            ValueError: there is no measured step, or one that cannot be.
            OSError: the file cannot be read.
        """
        file = Path(path)
        file = file / "events.jsonl" if file.is_dir() else file
        start: Record | None = None
        steps: list[tuple[int, Record]] = []
        caps: dict[int, int] = {}
        try:
            for line, record in numbered_events(file):
                match record:
                    case {"event": "RunStarted"}:
                        _check_start(record, caller, f"line {line} of {file}")
                        start, steps, caps = record, [], {}
                    case {"event": "StepMeasured"}:
                        num_before = len(steps[0][1]["batch_size"]) if steps else None
                        _check(record, num_before, caller, f"line {line} of {file}")
                        steps.append((line, record))
                    case {"event": "MemoryCapped", "rank": int(rank), "max_batch_size": int(most)}:
                        if record.get("unit", "samples") == "samples":
                            caps[rank] = most
        except UnicodeDecodeError as error:
            raise invalid(
                f"{caller}(path=...)", "be text in UTF-8", f"{file} ({error})", "Give its events."
            ) from error
        if not steps:
            remedy = "Train with `Runtime(run_dir=...)`, a few steps are enough."
            raise invalid(f"{caller}(path=...)", "hold a measured step", f"none in {file}", remedy)
        return cls(file, start, steps, caps)

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step; those of the newest step where no start was recorded."""
        if self.start is None:
            return sum(self.steps[-1][1]["batch_size"])
        return int(self.start["global_batch_size"])


def _check_start(record: Record, caller: str, where: str) -> None:
    """Raise unless it says what a run is of."""
    hosts: Any = record.get("hosts")
    devices: Any = record.get("devices")
    total = record.get("global_batch_size")
    lists = isinstance(hosts, list) and isinstance(devices, list)
    if not (type(total) is int and total >= 1 and lists and len(hosts) == len(devices)):
        got = f"{total}, {hosts} and {devices}"
        _refuse(caller, "give a global batch, hosts and devices at the start", got, where)


def _check(record: Record, world_size: int | None, caller: str, where: str) -> None:
    """Raise unless sizes and times of a step can be."""
    sizes, seconds = record.get("batch_size"), record.get("compute_s")
    if not (isinstance(sizes, list) and isinstance(seconds, list) and sizes):
        _refuse(caller, "give batch sizes and times", f"{sizes} and {seconds}", where)
    if len(sizes) != len(seconds) or world_size not in (None, len(sizes)):
        got = f"{len(sizes)} sizes and {len(seconds)} times"
        _refuse(caller, "speak of as many workers in each step", got, where)
    if not all(type(size) is int and size >= 0 for size in sizes):
        _refuse(caller, "hold whole samples", f"{sizes}", where)
    for size, second in zip(sizes, seconds, strict=True):
        is_time = type(second) in (int, float) and isfinite(second) and second > 0
        if size and not is_time:
            _refuse(caller, "hold positive times", f"{second} for {size} samples", where)


def _refuse(caller: str, rule: str, got: str, where: str) -> NoReturn:
    remedy = "The file is damaged there: leave the line out."
    raise invalid(f"{caller}(path=...)", rule, f"{got} in {where}", remedy)
