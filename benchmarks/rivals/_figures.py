"""What a run was like, from what its workers left, and what all runs of a rival were like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean, stdev
from typing import Any

from benchmarks.rivals._task import GLOBAL_BATCH_SIZE

BESIDE_S = 600.0
"""A round is compared with the nearest of ours, unless their ends are further apart."""


def figures(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return seconds per global batch of samples, overall and settled, and what was learnt.

    A worker's samples count from when it begins what comes after them. *Settled* is after half of
    all samples.
    """
    done: list[tuple[float, int, int]] = []  # when, how many samples, of which rank
    for number, rank in enumerate(ranks):
        ends = [began_s for began_s, _ in rank["began"][1:]] + [rank["ended_s"]]
        done += [(end, size, number) for end, (_, size) in zip(ends, rank["began"], strict=True)]
    done.sort()
    first_s = min(rank["began"][0][0] for rank in ranks)
    total = sum(size for _, size, _ in done)
    count, half = 0, 0
    while count < total / 2:
        count += done[half][1]
        half += 1
    half_s, last_s = done[half - 1][0], done[-1][0]
    late = [0] * len(ranks)
    for _, size, number in done[half:]:
        late[number] += size
    return {
        "num_samples": total,
        "num_updates": ranks[0]["num_updates"],
        "seconds": round(last_s - first_s, 3),
        "step_s": round((last_s - first_s) / total * GLOBAL_BATCH_SIZE, 4),
        "settled_step_s": round((last_s - half_s) / (total - count) * GLOBAL_BATCH_SIZE, 4),
        "settled_shares": [round(size / (total - count), 3) for size in late],
        "loss": round(ranks[0]["loss"], 4),
        "accuracy": round(ranks[0]["accuracy"], 4),
        "cpu_share": round(max(rank["cpu_share"] for rank in ranks), 3),
    }


@dataclass(frozen=True, slots=True)
class Summary:
    """All rounds of a rival that came to their end; a figure is a mean and a deviation.

    Attributes:
        step_s: seconds per global batch of samples, the first steps included; None where no round
            came to its end. The deviation is None for a single one.
        settled_s: the same over the second half of the samples.
        accuracy: on the test images at the end.
        num_done: rounds that came to their end.
        num_failed: the others.
    """

    step_s: Figure | None
    settled_s: Figure | None
    accuracy: Figure | None
    num_done: int
    num_failed: int


Figure = tuple[float, float | None]


def summed_up(found: Mapping[str, Any]) -> Summary:
    """Return what a rival's file says."""
    done = [each for each in found["rounds"] if each["status"] == "done"]
    steps, settled, right = (
        spread([each[key] for each in done]) for key in ("step_s", "settled_step_s", "accuracy")
    )
    return Summary(steps, settled, right, len(done), len(found["rounds"]) - len(done))


def spread(values: Sequence[float]) -> Figure | None:
    """Return mean and sample standard deviation."""
    if not values:
        return None
    return fmean(values), stdev(values) if len(values) > 1 else None


def settled_ratio(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Figure | None:
    """Return how many times as long as ours their settled steps are, round beside round."""
    ours_done = [each for each in ours["rounds"] if each["status"] == "done"]
    ratios = []
    for one in theirs["rounds"]:
        if one["status"] == "done" and ours_done:
            other = min(ours_done, key=lambda each: abs(_ended_s(each) - _ended_s(one)))
            if abs(_ended_s(other) - _ended_s(one)) <= BESIDE_S:
                ratios.append(one["settled_step_s"] / other["settled_step_s"])
    return spread(ratios)


def _ended_s(round_: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(round_["ended"]).timestamp()
