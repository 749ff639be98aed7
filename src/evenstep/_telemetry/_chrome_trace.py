"""A run's events as a trace that Perfetto opens: ranks as processes, phases as threads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

Record = Mapping[str, Any]
TraceEvent = dict[str, Any]

ALIGNMENT: Final = (
    "Clocks of ranks are not compared. All ranks begin a step together here, and each phase is as "
    "long as its rank measured it; the order of phases within a step is a convention. A step is as "
    "long as its longest rank."
)

PHASES: Final = (
    "input",
    "computing",
    "forward",
    "backward",
    "waiting",
    "communication",
    "optimizer",
    "evaluation",
    "checkpoint",
    "rest",
)
"""In the order they are drawn; computing is forward and backward where those are not told apart."""

_MOST_HELD = 1024  # measured steps that wait for their account


class _Block(NamedTuple):
    """Steps that are drawn as one, from their account or from what was measured of one."""

    first: int
    last: int
    spent_s: Mapping[str, Sequence[float]]
    sizes: Mapping[int, Sequence[int]]


@final
class ChromeTrace:
    """Turns the records of a run into trace events, one after the other, in bounded memory.

    The format is Chrome's JSON: complete events for phases, counters for batch sizes, and instants
    for all that happened else, such as plans. What training began anew follows what was before.

    Args:
        steps: those that are drawn; None is all.

    Attributes:
        num_slices: phases drawn so far.
        drawn: the first and the last step drawn; None before one is.
    """

    def __init__(self, steps: range | None = None) -> None:
        self._wanted = steps
        self._now_us = 0.0
        self._newest = -1  # step that was drawn or passed over
        self._measured: dict[int, Record] = {}
        self._marks: defaultdict[int, list[Record]] = defaultdict(list)
        self.num_slices = 0
        self.drawn: tuple[int, int] | None = None

    def of(self, records: Iterable[Record]) -> Iterator[TraceEvent]:
        """Yield the trace of a run."""
        for record in records:
            yield from self._take(record)
        yield from self._flush()

    def _take(self, record: Record) -> Iterator[TraceEvent]:
        name, step = record["event"], record.get("step")
        if name == "RunStarted":
            yield from self._flush()
            self._newest = -1  # it may go on from an earlier step
            yield from _names(record)
        if name == "StepMeasured":
            self._measured[record["step"]] = record
            if len(self._measured) > _MOST_HELD:
                yield from self._draw_measured(min(self._measured))
        elif name == "StepsAccounted":
            yield from self._draw_accounted(record)
        elif step is None:
            yield _mark(record, self._now_us)
        elif step > self._newest:
            self._marks[step].append(record)
        elif self._is_wanted(step, step):
            yield _mark(record, self._now_us)

    def _flush(self) -> Iterator[TraceEvent]:
        while self._measured:
            yield from self._draw_measured(min(self._measured))
        for step in sorted(self._marks):
            yield from self._mark_all(step, self._now_us)

    def _draw_accounted(self, record: Record) -> Iterator[TraceEvent]:
        last, first = record["step"], record["step"] - record["num_steps"] + 1
        if first <= self._newest:  # drawn as measured: its account came too late
            return
        for step in sorted(self._measured):
            if step < first:
                yield from self._draw_measured(step)
        inside = [step for step in sorted(self._measured) if step <= last]
        sizes = {step: self._measured.pop(step)["batch_size"] for step in inside}
        spent_s = {phase: record[f"{phase}_s"] for phase in PHASES if f"{phase}_s" in record}
        yield from self._draw(_Block(first, last, spent_s, sizes))

    def _draw_measured(self, step: int) -> Iterator[TraceEvent]:
        record = self._measured.pop(step)
        names = {"input": "data_s", "computing": "compute_s", "waiting": "idle_s"}
        spent_s = {phase: record[name] for phase, name in names.items()}
        yield from self._draw(_Block(step, step, spent_s, {step: record["batch_size"]}))

    def _draw(self, block: _Block) -> Iterator[TraceEvent]:
        self._newest = max(self._newest, block.last)
        num_steps = block.last - block.first + 1
        is_wanted = self._is_wanted(block.first, block.last)
        lasts_us = 1e6 * max(map(math.fsum, zip(*block.spent_s.values(), strict=True)))
        if is_wanted:
            begun = self.drawn[0] if self.drawn else block.first
            self.drawn = min(begun, block.first), max(begun, block.last)
            yield from self._slices(block)
        for step in sorted(step for step in self._marks if step <= block.last):
            late = max(step - block.first, 0) / num_steps
            yield from self._mark_all(step, self._now_us + late * lasts_us)
        if not is_wanted:
            return
        for step, sizes in block.sizes.items():
            at_us = self._now_us + (step - block.first) / num_steps * lasts_us
            for rank, size in enumerate(sizes):
                yield _event("C", "batch size", at_us, rank, 0, args={"samples": size})
        self._now_us += lasts_us

    def _slices(self, block: _Block) -> Iterator[TraceEvent]:
        which = f"{block.first}" if block.first == block.last else f"{block.first}-{block.last}"
        ranks = range(len(next(iter(block.spent_s.values()))))
        for rank in ranks:
            at_us = self._now_us
            for thread, phase in enumerate(PHASES, start=1):
                seconds = block.spent_s.get(phase)
                if seconds is None or seconds[rank] <= 0:
                    continue
                lasts_us = 1e6 * seconds[rank]
                self.num_slices += 1
                event = _event("X", phase, at_us, rank, thread, args={"step": which})
                yield {**event, "dur": round(lasts_us, 3)}
                at_us += lasts_us

    def _mark_all(self, step: int, at_us: float) -> Iterator[TraceEvent]:
        records = self._marks.pop(step)
        if self._is_wanted(step, step):
            for record in records:
                yield _mark(record, at_us)

    def _is_wanted(self, first: int, last: int) -> bool:
        return self._wanted is None or (last >= self._wanted.start and first < self._wanted.stop)


def _event(kind: str, name: str, at_us: float, rank: int, thread: int, **more: Any) -> TraceEvent:
    known = {"name": name, "ph": kind, "cat": "evenstep", "ts": round(at_us, 3)}
    return {**known, "pid": rank, "tid": thread, **more}


def _mark(record: Record, at_us: float) -> TraceEvent:
    """Return an instant: on its rank if there is one, and across all ranks otherwise."""
    name, rank = record["event"], record.get("rank")
    if name == "Rebalanced":
        name = f"plan {record['plan_epoch']}"
    elif name == "WaitingDiagnosed":
        causes = zip(record["causes"], record["ranks"], strict=True)
        said = [f"rank {rank}: {cause}" if rank >= 0 else cause for cause, rank in causes]
        name = ", ".join(said) or "no verdict"
    args = {key: value for key, value in record.items() if key != "event"}
    scope = "g" if rank is None else "p"
    return _event("i", name, at_us, 0 if rank is None else rank, 0, s=scope, args=args)


def _names(record: Record) -> Iterator[TraceEvent]:
    """Yield what ranks and phases are called."""
    for rank, where in enumerate(zip(record["hosts"], record["devices"], strict=True)):
        label = f"rank {rank} ({', '.join(where)})"
        told: list[tuple[str, int, dict[str, Any]]] = [
            ("process_name", 0, {"name": label}),
            ("process_sort_index", 0, {"sort_index": rank}),
        ]
        for thread, phase in enumerate(("events", *PHASES)):
            told.append(("thread_name", thread, {"name": phase}))
            told.append(("thread_sort_index", thread, {"sort_index": thread}))
        for name, thread, args in told:
            yield {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": args}
