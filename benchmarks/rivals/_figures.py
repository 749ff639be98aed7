"""What a run was like, from what its workers left, and what all runs of a rival were like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.rivals._task import GLOBAL_BATCH_SIZE


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
