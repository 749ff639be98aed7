"""The plans of a recorded run, read from its events: all of them, or an error."""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from ..events import SCHEMA_VERSION
from ..exceptions import invalid

Sizes = tuple[int, ...]

_NAME = re.compile(rb'\{"event": "(\w+)"')
_PASSED_OVER = frozenset({b"StepsAccounted", b"ExchangeMeasured", b"WaitingDiagnosed"})


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """A plan as the events tell it.

    Attributes:
        first_step: first optimizer step that uses it.
        batch_size: local batch sizes, one per rank.
        max_forward: most samples of a rank's forwards; None where there was no limit, or where
            that follows from the settings of the run.
        tail: sizes of the short last step of an epoch, as it ran; None if none ran.
    """

    first_step: int
    batch_size: Sizes
    max_forward: Sizes | None = None
    tail: Sizes | None = None


@final
class PlanRecord:
    """All plans of a run, from its first step on; never changed.

    Its ``repr`` is a checksum, by which ranks compare what each of them has read.

    Args:
        world_size: number of workers.
        global_batch_size: samples of a full step.
        steps: the first and the last step that was reported.
        plans: in order. Several may begin with the same step: the last of them is in force, but
            each has moved samples from rank to rank.

    Attributes:
        world_size, global_batch_size, plans: likewise.
        first_step: the first that was reported.
        last_step: the last one.
    """

    def __init__(
        self,
        world_size: int,
        global_batch_size: int,
        steps: tuple[int, int],
        plans: tuple[RecordedPlan, ...],
    ) -> None:
        self.world_size, self.global_batch_size = world_size, global_batch_size
        self.first_step, self.last_step = steps
        self.plans = plans

    def __repr__(self) -> str:
        checksum = zlib.crc32(repr(self.plans).encode())
        of_what = f"{self.world_size} workers, steps {self.first_step} to {self.last_step}"
        return f"<{len(self.plans)} plans of {of_what}, checksum {checksum:08x}>"

    def in_force(self, step: int) -> RecordedPlan:
        """Return the plan of ``step``: the first one before all, the last one after."""
        number = bisect_right(self.plans, step, key=lambda plan: plan.first_step)
        return self.plans[max(number - 1, 0)]


def read_plans(run: str | Path) -> PlanRecord:
    """Return the plans of the newest run in a file of events.

    Args:
        run: its folder, or its ``events.jsonl``.

    Raises:
        ValueError: plans are missing or damaged, or samples went other ways than the plans say.
        OSError: the file cannot be read.
    """
    file = Path(run)
    file = file / "events.jsonl" if file.is_dir() else file
    reading = _Reading(file)
    for line, record in _records(file):
        try:
            reading.take(line, record)
        except (KeyError, TypeError) as error:
            raise _refused("be an intact record", f"{error!r} in line {line} of {file}") from error
    return reading.found()


def _refused(rule: str, got: str, remedy: str = "Record the run again.") -> ValueError:
    return invalid("Replay(run=...)", rule, got, remedy)


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records that may tell of plans, each with its line, from 1."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return  # the run was killed, or is writing
            name = _NAME.match(line)
            if name is not None and name[1] in _PASSED_OVER:
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                got = f"{error} in line {number} of {file}"
                raise _refused("be an intact record", got) from error
            if not isinstance(record, dict):
                raise _refused("be the events of a run", f"line {number} of {file}")
            yield number, record


class _Reading:
    """What the events so far tell; each plan stands before the steps that it is for."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._line = 0
        self._world_size = self._total = 0
        self._begin()

    def _begin(self) -> None:
        self._plans: list[RecordedPlan] = []  # from the second on
        self._first: Sizes | None = None  # sizes of the first
        self._first_tail: Sizes | None = None
        self._steps: tuple[int, int] | None = None
        self._is_over = False

    def take(self, line: int, record: dict[str, Any]) -> None:
        """Take in the record of a line."""
        self._line, name = line, record.get("event")
        if name == "Schema" and record["version"] > SCHEMA_VERSION:
            got = f"schema {record['version']} in line {line} of {self._file}"
            raise _refused(f"have a schema up to {SCHEMA_VERSION}", got, "Upgrade evenstep.")
        if name == "RunStarted":
            self._world_size, self._total = record["world_size"], record["global_batch_size"]
            self._begin()
        elif not self._is_over:
            self._take(str(name), record)

    def _take(self, name: str, record: dict[str, Any]) -> None:
        match name:
            case "EstimatesRestored":
                self._first = self._sizes(record["batch_size"])
            case "Rebalanced":
                self._rebalanced(record)
            case "StepMeasured":
                self._measured(record["step"], self._sizes(record["batch_size"], is_full=False))
            case "MeasurementRejected":
                self._ran(record["step"])
            case "ClaimsSwitched" if record["on"]:
                raise self._claimed(f"claims from step {record['step']} on")
            case "BalancingStopped":
                self._is_over = True  # and with it the record: no event has the sizes after it

    def _rebalanced(self, record: dict[str, Any]) -> None:
        number, epoch = len(self._plans) + 1, record["plan_epoch"]
        if epoch != number:
            got = f"plan {epoch} after plan {number - 1} in line {self._line} of {self._file}"
            raise _refused("hold every plan", got, "Record the run again; a full disk drops some.")
        forward = record.get("max_forward")
        self._plans.append(
            RecordedPlan(
                record["step"],
                self._sizes(record["batch_size"]),
                None if forward is None else self._sizes(forward, is_full=False),
            )
        )

    def _measured(self, step: int, sizes: Sizes) -> None:
        self._ran(step)
        number = bisect_right(self._plans, step, key=lambda plan: plan.first_step) - 1
        plan = self._plans[number] if number >= 0 else None
        if sum(sizes) != self._total:
            if plan is None:
                self._first_tail = sizes
            else:
                self._plans[number] = replace(plan, tail=sizes)
            return
        planned = self._first if plan is None else plan.batch_size
        if planned is None:
            self._first = planned = sizes
        if planned != sizes:
            raise self._claimed(f"{list(sizes)} in step {step}, planned {list(planned)}")

    def _ran(self, step: int) -> None:
        first, last = self._steps or (step, step)
        self._steps = min(first, step), max(last, step)

    def _sizes(self, given: Any, *, is_full: bool = True) -> Sizes:
        sizes = tuple(given)
        is_good = all(type(size) is int and size >= 0 for size in sizes)
        if not is_good or len(sizes) != self._world_size or (is_full and sum(sizes) != self._total):
            rule = f"give {self._world_size} sizes that add up to {self._total}"
            raise _refused(rule, f"{given} in line {self._line} of {self._file}")
        return sizes

    def _claimed(self, what: str) -> ValueError:
        return _refused(
            "be of a run whose samples were counted and stayed with their rank",
            f"{what}, in line {self._line} of {self._file}",
            "Events do not hold which samples were claimed or assigned by cost: record a run "
            'with `Runtime(claims="off")` and without `cost`.',
        )

    def found(self) -> PlanRecord:
        """Return the plans.

        Raises:
            ValueError: no step was measured.
        """
        if self._steps is None or self._first is None:
            remedy = "Train with `Runtime(run_dir=...)`."
            raise _refused("hold a step that was measured", f"none in {self._file}", remedy)
        opening = RecordedPlan(self._steps[0], self._first, tail=self._first_tail)
        return PlanRecord(self._world_size, self._total, self._steps, (opening, *self._plans))
