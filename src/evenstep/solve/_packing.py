"""Samples of one worker packed into forwards under caps."""

from __future__ import annotations

import numpy as np

from .._types import IntArray


def pack(
    size: IntArray, max_size: int, max_samples: int, num_forwards: int | None, *, empty: bool
) -> IntArray | None:
    """Return the forward of each sample, or None where they do not fit.

    The largest first, each into the forward that has least, so that forwards are alike; where
    that fails, each into the fullest one that it fits into.

    Args:
        size: of the samples, none past ``max_size``, ``(num_samples,)``.
        max_size: of a forward.
        max_samples: of a forward.
        num_forwards: how many there are; None takes as few as are found to do.
        empty: whether some may be left without a sample.
    """
    fewest = max(-(-len(size) // max_samples), -(-int(size.sum()) // max(max_size, 1)), 1)
    if num_forwards is not None:
        numbers = range(num_forwards, num_forwards + 1) if num_forwards >= fewest else range(0)
    else:
        numbers = range(fewest, max(len(size), 1) + 1)
    order = np.argsort(-size, kind="stable").tolist()
    for number in numbers:
        for fullest in (False, True):
            found = _try(
                size.tolist(), order, (max_size, max_samples), number, fullest=fullest, empty=empty
            )
            if found is not None:
                return np.array(found, np.int64)
    return None


def _try(
    size: list[int],
    order: list[int],
    most: tuple[int, int],
    number: int,
    *,
    fullest: bool,
    empty: bool,
) -> list[int] | None:
    held, counts, forward = [0] * number, [0] * number, [0] * len(size)
    for place, sample in enumerate(order):
        open_ = [
            one
            for one in range(number)
            if held[one] + size[sample] <= most[0] and counts[one] < most[1]
        ]
        if not empty and counts.count(0) >= len(order) - place:
            open_ = [one for one in open_ if not counts[one]]
        if not open_:
            return None
        one = (max if fullest else min)(open_, key=lambda one: held[one])
        held[one] += size[sample]
        counts[one] += 1
        forward[sample] = one
    return forward
