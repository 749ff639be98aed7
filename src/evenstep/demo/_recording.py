"""What is known of one training run, filled record by record, live or afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ._notes import Tail

Record = dict[str, Any]
RECENT = 5
"""Steps that what is shown live is about."""

_KEPT = {
    "Phase": {"phase": "text"},
    "RunStarted": {"num_steps": "num_steps", "global_batch_size": "global_batch_size"},
    "Rebalanced": {"reason": "reason"},
    "Done": {"late_steps": "late_steps"},
}
"""By event, which attribute is which field of its newest record."""


@dataclass(slots=True)
class Recording:
    """One run, as its events and notes tell it. Records of other kinds are passed over.

    Attributes:
        num_steps: optimizer steps that it is to take; 0 while unknown.
        global_batch_size: samples per step over all workers; 0 while unknown.
        phase: what it is doing, in words.
        reason: the policy's latest words.
        batch_size: samples, per measured step and rank.
        compute_s: own computing, per measured step and rank.
        idle_s: waiting for the slowest, per measured step and rank.
        makespan_s: the slowest worker's computing, per measured step.
        wall_s: what the step took in all, per measured step; None where unknown.
        loss: mean over the global batch, per step.
        measured: what the workers found out about the machine, if they were asked.
        late_steps: steps in which the real computing was longer than the emulated time.
        ended: whether the run was brought to its end.
    """

    num_steps: int = 0
    global_batch_size: int = 0
    phase: str = "starting the workers"
    reason: str = ""
    batch_size: list[tuple[int, ...]] = field(default_factory=list)
    compute_s: list[tuple[float, ...]] = field(default_factory=list)
    idle_s: list[tuple[float, ...]] = field(default_factory=list)
    makespan_s: list[float] = field(default_factory=list)
    wall_s: list[float | None] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    measured: Record | None = None
    late_steps: int = 0
    ended: bool = False

    def add(self, record: Record) -> None:
        """Take in one record of ``events.jsonl`` or ``notes.jsonl``."""
        event = record["event"]
        for name, field_of_record in _KEPT.get(event, {}).items():
            setattr(self, name, record[field_of_record])
        match event:
            case "StepMeasured":
                self.batch_size.append(tuple(record["batch_size"]))
                self.compute_s.append(tuple(record["compute_s"]))
                self.idle_s.append(tuple(record["idle_s"]))
                self.makespan_s.append(record["makespan_s"])
                self.wall_s.append(record["wall_s"])
            case "Losses":
                self.loss.extend(record["loss"])
            case "Measured":
                self.measured = record
            case "RunEnded":
                self.ended = True

    @property
    def num_done(self) -> int:
        """How many steps were measured so far."""
        return len(self.makespan_s)

    def recent(self, per_rank: list[tuple[float, ...]]) -> list[float]:
        """Return the median of the last few steps for every rank, of steps with the same sizes."""
        sizes = self.batch_size[-1]
        rows = [
            row
            for row, size in zip(per_rank[-RECENT:], self.batch_size[-RECENT:], strict=True)
            if size == sizes
        ]
        return [float(median(column)) for column in zip(*rows, strict=True)]

    def idle_share(self, *, last: int | None = None) -> float:
        """Return the share of the workers' time spent waiting for the slowest one's computing."""
        idle_s, makespan_s = self.idle_s[-(last or 0) :], self.makespan_s[-(last or 0) :]
        return sum(map(sum, idle_s)) / (len(idle_s[0]) * sum(makespan_s))

    def known_wall_s(self, *, last: int | None = None) -> list[float]:
        """Return the step times that are known, of the ``last`` steps or of all."""
        rows = self.wall_s if last is None else self.wall_s[-last:]
        return [wall for wall in rows if wall is not None]

    def left_s(self) -> float | None:
        """Return the time the remaining steps will take, going by the last few."""
        walls = self.known_wall_s(last=RECENT)
        if not walls or not self.num_steps:
            return None
        return median(walls) * (self.num_steps - self.num_done)


class Follower:
    """Keeps a ``Recording`` up to date with the files in a run's folder.

    Args:
        run_dir: the folder; the files in it need not exist yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self.recording = Recording()
        self._tails = [Tail(run_dir / "notes.jsonl"), Tail(run_dir / "events.jsonl")]

    def update(self) -> Recording:
        """Read what was added since the last call."""
        for tail in self._tails:
            for record in tail.read():
                self.recording.add(record)
        return self.recording
