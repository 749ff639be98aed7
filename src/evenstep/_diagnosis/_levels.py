"""What each rank's own computing rests at, beside what comes and goes, and against earlier times.

Step by step, a rank that is always a little slower hides behind one that is much slower at times,
and of two slow ranks the less slow one looks as usual. Levels tell these apart: the low quantile of
some steps is what a rank takes when nothing else disturbs it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._types import FloatArray
from ._course import clear_step
from ._frontier import dealt, usual_of

_SIZE = 10  # rows of a block
_LOW = 1  # the second shortest of them: others may be longer for any reason
_FEWEST = 3  # blocks
_GROWN = 0.08  # of what was usual: by at least so much it has to become longer
_CHANGED = 0.5  # of the largest change of a rank: less is none
_LEAST_Z = 2.2


class Levels(NamedTuple):
    """Means over steps, in microseconds.

    Attributes:
        cost: what a step is longer by, by the level of each rank, ``(world_size,)``.
        above: forward and backward above what is usual, ``(world_size, 2)``.
        usual: what is usual of these, ``(2,)``.
        lasts: whose level is above it throughout, not by chance, ``(world_size,)``.
        is_hidden: whether it is against earlier times, as too many ranks are slow by now.
        slower: levels above what is usual, as a part of it, ``(num_blocks, world_size)``.
    """

    cost: FloatArray
    above: FloatArray
    usual: FloatArray
    lasts: FloatArray
    is_hidden: bool
    slower: FloatArray

    def lasting(self) -> FloatArray:
        """Return what a step is longer by, by the level of one rank alone, ``(world_size,)``."""
        cost = np.where(self.lasts, self.cost, 0.0)
        if self.is_hidden:
            return cost
        more = np.array([more_than_others(self.cost, rank) for rank in range(len(cost))])
        found: FloatArray = np.where(more >= 0.5 * cost, np.minimum(more, cost), 0.0)
        return found


def more_than_others(values: FloatArray, rank: int) -> float:
    """Return by how much a rank is above the lower median of the others: what chance costs."""
    others = np.sort(np.delete(values, rank))
    return float(values[rank] - others[(len(others) - 1) // 2])


def levels_of(rows: FloatArray, num_newest: int, *, looks_back: bool) -> Levels | None:
    """Return the ranks' levels in the newest rows; None if they are too few.

    What is usual is the lower median of the ranks' levels in a block. If that became longer in the
    run, while most ranks' own levels stayed, it is what it was before: they are slow one after the
    other. If most became longer at once, it is what is usual by now, as with larger inputs.

    Args:
        rows: own forward and backward in the course of the run, ``(num_rows, world_size, 2)``.
        num_newest: how many rows are looked at.
        looks_back: whether earlier times of a rank say something of it.
    """
    blocks = np.partition(
        rows[len(rows) % _SIZE :].reshape(-1, _SIZE, *rows.shape[1:]), _LOW, axis=1
    )[:, _LOW]
    number = min(len(blocks), round(num_newest / _SIZE))
    if number < _FEWEST:
        return None
    usual = usual_of(blocks[None])[0]
    begin = _onset_of_hidden(usual.sum(axis=1), blocks.sum(axis=2)) if looks_back else 0
    if begin:
        usual = np.minimum(usual, np.median(usual[:begin], axis=0))
    above = (blocks - usual[:, None])[-number:]
    whole = above.sum(axis=2)
    chance = whole.std(axis=0) / np.sqrt(number)
    return Levels(
        cost=dealt(np.maximum(above, 0.0)[None])[0].sum(axis=2).mean(axis=0),
        above=above.mean(axis=0),
        usual=usual[-number:].mean(axis=0),
        lasts=whole.mean(axis=0) > _LEAST_Z * chance,
        is_hidden=begin > 0,
        slower=(blocks - usual[:, None]).sum(axis=2) / np.maximum(usual.sum(axis=1), 1e-9)[:, None],
    )


def _onset_of_hidden(usual: FloatArray, levels: FloatArray) -> int:
    """Return the block from which on too many ranks are slow, one after the other; 0 if none.

    Args:
        usual: the lower median of the ranks' levels, ``(num_blocks,)``.
        levels: of all ranks, ``(num_blocks, world_size)``.
    """
    at, before, after = clear_step(usual)
    if not at or after < (1 + _GROWN) * before:
        return 0
    for near in (2, max(2, len(usual) // 6)):  # at once, and over some time
        change = levels[at : at + near].mean(axis=0) - levels[max(0, at - near) : at].mean(axis=0)
        num_changed = int((change >= _CHANGED * change.max()).sum())
        has_moved = change.min() < -_CHANGED * change.max()  # from one rank to another
        is_clear = change.max() >= _CHANGED * (after - before) and not has_moved
        if is_clear and 2 * num_changed <= len(change):
            return at
    return 0
