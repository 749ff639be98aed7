"""The answer of ``evenstep plan``, for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

from .. import AffineTime
from .._render import counted, number, paragraph, percent, printable, seconds, text_table
from ..advice._advice import Advice, PlannedSplit
from ..advice._recorded_run import RunTimes

ROUGH = 0.1
"""A speed with a larger standard error gets a word."""

LITTLE = 0.01
"""A worker whose loss costs less than this is said to bring little."""


def as_text(run: RunTimes, advice: Advice, more: AffineTime, width: int | None = None) -> str:
    """Return the answer in words and tables, for a terminal of ``width`` columns or of any."""
    parts = [
        paragraph(_head(run), width),
        _splits(run, advice, width),
        _workers(run, advice, width),
        _added(advice, more, width),
        *(paragraph(note, width) for note in _notes(run, advice)),
    ]
    return "\n\n".join(parts)


def as_json(run: RunTimes, advice: Advice, more: AffineTime) -> dict[str, Any]:
    """Return the answer as plain values, times in seconds and shares as fractions of 1."""
    times, caps = run.times, run.max_batch_size
    workers = [
        {
            "rank": run.ranks[at],
            "name": _name(run, at),
            "samples_per_s": _finite(_speed(times, at)),
            "samples_per_s_error": _error(run, at),
            "intercept_s": float(times.intercept_s[at]),
            "max_batch_size": None if caps is None else int(caps[at]),
            "equal_batch_size": advice.equal.batch_size[at],
            "batch_size": advice.balanced.batch_size[at],
            "step_without_s": None if without is None else without.step_s,
            "brings": advice.brings(at),
            "worth_keeping": advice.worth_keeping[at],
        }
        for at, without in enumerate(advice.without)
    ]
    added = [
        {
            "samples_per_s": _finite(_speed(more, index)),
            "intercept_s": float(more.intercept_s[index]),
            "batch_size": split.batch_size[-1],
            "step_s": split.step_s,
            "step_shorter_by": advice.adds(index),
        }
        for index, split in enumerate(advice.more)
    ]
    return {
        "global_batch_size": run.global_batch_size,
        "overhead_s": run.overhead_s,
        "equal": _split(advice.equal),
        "balanced": _split(advice.balanced),
        "best": _split(advice.best),
        "workers": workers,
        "add": added,
    }


def _split(split: PlannedSplit) -> dict[str, Any]:
    return {
        "batch_size": list(split.batch_size),
        "step_s": split.step_s,
        "samples_per_s": split.samples_per_s,
    }


def _head(run: RunTimes) -> str:
    workers = counted(run.times.world_size, "worker")
    text = f"{workers}, {run.global_batch_size} samples a step"
    if run.num_steps:
        text += f"; speeds from {run.num_steps} recorded steps, slowest worker "
        text += f"{seconds(run.step_s)} in the median"
    if run.overhead_s:
        text += f"; {seconds(run.overhead_s)} of every step are not computing"
    return text


def _splits(run: RunTimes, advice: Advice, width: int | None) -> str:
    named = [("equal split", advice.equal), ("balanced", advice.balanced)]
    if out := _left_out(run, advice):
        named.append((f"without {out}", advice.best))
    rows = []
    for name, split in named:
        gain = f"{advice.equal.step_s / split.step_s:.2f}"
        rows.append([name, seconds(split.step_s), number(split.samples_per_s), gain])
    return text_table(["", "step", "samples/s", "times as fast"], rows, width=width)


def _workers(run: RunTimes, advice: Advice, width: int | None) -> str:
    header = ["worker", "samples/s", "fixed cost", "equal", "balanced", "step without it", ""]
    rows = []
    for at, without in enumerate(advice.without):
        cost = seconds(float(run.times.intercept_s[at]))
        sizes = [str(split.batch_size[at]) for split in (advice.equal, advice.balanced)]
        speed = number(_speed(run.times, at))
        if (error := _error(run, at)) is not None:
            speed += f" ± {_rounded(error)} %"
        rows.append([_name(run, at), speed, cost, *sizes, *_verdict(advice, at, without)])
    return text_table(header, rows, width=width)


def _verdict(advice: Advice, at: int, without: PlannedSplit | None) -> tuple[str, str]:
    """Return the step without a worker, and what that says of it."""
    brings = advice.brings(at)
    if without is None or brings is None:
        return "does not fit", "needed"
    text = f"{seconds(without.step_s)} ({'+' if brings >= 0 else ''}{percent(brings)} %)"
    if not advice.worth_keeping[at]:
        return text, "leave out"
    return text, "brings little" if brings < LITTLE else "keep"


def _added(advice: Advice, more: AffineTime, width: int | None) -> str:
    rows = [
        [
            f"{number(_speed(more, index))} samples/s, {seconds(float(more.intercept_s[index]))} "
            "fixed",
            str(split.batch_size[-1]),
            seconds(split.step_s),
            f"{percent(advice.adds(index))} %",
        ]
        for index, split in enumerate(advice.more)
    ]
    return text_table(["one more machine", "balanced", "step", "shorter by"], rows, width=width)


def _notes(run: RunTimes, advice: Advice) -> Iterator[str]:
    if out := _left_out(run, advice):
        yield (
            f"Fastest without worker {out}: one sample there takes as long as the whole global "
            "batch on the others."
        )
    if missing := run.untimed:
        text = "Rank {} has no times and is left out."
        if len(missing) > 1:
            text = "Ranks {} have no times and are left out."
        yield text.format(", ".join(map(str, missing)))
    if run.saved_by_cost is not None:
        saved = [percent(share) for share in run.saved_by_cost]
        yield (
            "The run assigned samples by cost. Of computing with equal counts, speeds alone would "
            f"have saved {saved[0]} %, lengths alone {saved[1]} %; both saved {saved[2]} %. Batch "
            "sizes tell little of its times: the fixed costs and speeds above are rough."
        )
    is_rough = (run.speed_error > ROUGH) & run.is_line_known
    if is_rough.any():
        yield (
            f"The batch sizes of worker {_called(run, is_rough)} were too similar for this "
            "much noise: fixed cost and samples/s are uncertain, and workers that differ by less "
            "than their errors may be equal. Steps near the sizes of the run are known to "
            f"{_rounded(float(run.time_error[is_rough].max()))} %."
        )
    if not run.is_line_known.all():
        yield (
            f"Worker {_called(run, ~run.is_line_known)} had one batch size only, so its "
            "fixed cost is unknown and assumed to be 0. Record a run with a policy that balances "
            "to measure it."
        )


def _left_out(run: RunTimes, advice: Advice) -> str:
    """Return the workers that are not worth keeping, nothing if all are."""
    return _called(run, [not keep for keep in advice.worth_keeping])


def _called(run: RunTimes, chosen: Iterable[bool]) -> str:
    """Return the numbers of the chosen workers."""
    return ", ".join(str(rank) for rank in compress(run.ranks, chosen))


def _name(run: RunTimes, at: int) -> str:
    rank = run.ranks[at]
    return printable(f"{rank} {run.names[at]}") if run.names else str(rank)


def _speed(times: AffineTime, at: int) -> float:
    """Return samples per second past the fixed cost; infinite where samples cost nothing."""
    slope_s = float(times.slope_s[at])
    return 1 / slope_s if slope_s else math.inf


def _error(run: RunTimes, at: int) -> float | None:
    """Return the relative standard error of a recorded speed; None of one that was typed."""
    return float(run.speed_error[at]) if run.num_steps else None


def _rounded(share: float) -> str:
    """Return a share in whole percent, and no more than all of it."""
    return f"{max(1, round(100 * min(share, 1.0)))}"


def _finite(value: float) -> float | None:
    """Return what JSON has a word for."""
    return value if math.isfinite(value) else None
