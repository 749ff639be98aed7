"""How slowness develops in time, and what each rank's own computing rests at meanwhile.

A course is steady, growing, or coming and going, and may jump. Step by step, a rank that is always
a little slower hides behind one that is much slower at times, and of two slow ranks the less slow
one looks as usual. Levels separate these: the low quantile of some steps is what a rank takes
when nothing else disturbs it.
"""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np

from .._types import FloatArray
from ._account import Cause
from ._critical_path import dealt, usual_of

_MOST_ROWS = 512  # that are kept of a run; of a longer one, each is the mean of several steps
_BLOCKS = 120  # into which a course is cut to be looked at
_BENDS = 30  # where a slope may begin or end
_FEWEST = 12  # steps in which a course can be recognized
_LOW = 0.3  # of the high level: at most so much when it goes
_MOST_ROUNDS = 8  # of finding two levels, and then where each is
_GROWN = 0.5  # of the last level: at most so much before it grew; else it was slow from the start


@final
class Course:
    """Keeps some quantities, as how much slower each rank was, over the newest steps and the run.

    In constant memory: once it is full, neighbours are merged, and a row is the mean of more steps.

    Args:
        num_columns: how many quantities, as many as ranks.
    """

    def __init__(self, num_columns: int) -> None:
        self._run = np.zeros((0, num_columns))
        self._stride = 1
        self._left = np.zeros((0, num_columns))  # not enough for a row yet
        self._newest = np.zeros((0, num_columns))

    def add(self, slower: FloatArray) -> None:
        """Take in some steps, ``(num_steps, num_columns)``."""
        self._newest = np.concatenate([self._newest, slower])[-_MOST_ROWS:]
        self._left = np.concatenate([self._left, slower])
        whole = len(self._left) // self._stride * self._stride
        self._run = np.concatenate([self._run, _merged(self._left[:whole], self._stride)])
        self._left = self._left[whole:]
        while len(self._run) > _MOST_ROWS:
            even = len(self._run) // 2 * 2
            self._left = np.concatenate(  # the odd one out counts as the steps that it stands for
                [np.repeat(self._run[even:], self._stride, axis=0), self._left]
            )
            self._run = _merged(self._run[:even], 2)
            self._stride *= 2

    def cause(self, rank: int) -> Cause:
        """Return why a rank is slow, by how that develops in the run and in the newest steps."""
        found = cause_of(self._run[:, rank])
        if found is Cause.SLOW_WORKER and self._stride > 1:
            newest = cause_of(self._newest[:, rank])
            return Cause.CONTENTION if newest is Cause.CONTENTION else found
        return found

    def jump(self, column: int = 0) -> tuple[float, float]:
        """Return the levels before and after the clearest step of the run; its mean twice if none.

        A step has to be better than no step, by the score of ``cause_of``.
        """
        run = self._run[:, column]
        if len(run) < _FEWEST:
            return 0.0, 0.0
        return clear_step(_blocks(run))[1:]

    def rows(self, number: float) -> tuple[FloatArray, int]:
        """Return the rows of the run, ``(num_rows, num_columns)``, and how many are newest.

        Args:
            number: how many that were taken in the newest are.
        """
        return self._run, round(number / self._stride)


def clear_step(y: FloatArray) -> tuple[int, float, float]:
    """Return where the clearest step is, and the levels before and after; 0 and the mean if none.

    Args:
        y: means of blocks, or levels, in their order.
    """
    score, at, before, after = _best_step(y)
    if score < _score(((y - y.mean()) ** 2).sum(), len(y), 1):
        return at, before, after
    return 0, float(y.mean()), float(y.mean())


def _merged(rows: FloatArray, number: int) -> FloatArray:
    merged: FloatArray = rows.reshape(-1, number, rows.shape[1]).mean(axis=1)
    return merged


def cause_of(slower: FloatArray) -> Cause:
    r"""Return why a rank is slow, by which of three courses fits best.

    A course that grows in the run is throttling, one that comes and goes contention; else the
    worker is slow throughout. The three are a step from one level to another; a slope between two
    levels, over a sixth of the time at least; two levels that alternate. The best has the least
    $n \log(S / n) + 2 k \log n$, with $S$ the sum of squares that it leaves of $n$ blocks and $k$
    its parameters (Schwarz, Annals of Statistics 6, 1978, with twice the penalty, as neighbouring
    steps are no independent ones).

    Args:
        slower: own computing above the others', as a part of theirs, by step.
    """
    if len(slower) < _FEWEST:
        return Cause.SLOW_WORKER
    y = _blocks(slower)
    (step, _, low, high), (slope, begin, end) = _best_step(y), _best_slope(y)
    two, levels = _two_levels(y)
    best = min(step, slope, two)
    if best == two and levels[0] < _LOW * levels[1]:
        return Cause.CONTENTION
    if best == slope and begin < _GROWN * end:
        return Cause.THROTTLING
    if high < _LOW * low:  # it went and did not come back
        return Cause.CONTENTION
    return Cause.CONTENTION if _alternates(slower) else Cause.SLOW_WORKER


def _blocks(values: FloatArray) -> FloatArray:
    """Return the means of at most ``_BLOCKS`` parts."""
    number = min(_BLOCKS, len(values))
    lengths = np.full(number, len(values) // number)
    lengths[: len(values) % number] += 1
    means: FloatArray = np.add.reduceat(values, np.cumsum(lengths) - lengths) / lengths
    return means


def _score(left: FloatArray | float, num_blocks: int, num_parameters: int) -> FloatArray:
    squares = np.maximum(left, 1e-12)
    score: FloatArray = num_blocks * np.log(squares / num_blocks) + 2 * num_parameters * np.log(
        num_blocks
    )
    return score


def _best_step(y: FloatArray) -> tuple[float, int, float, float]:
    """Return the score of the best step, where it is, and the levels before and after it."""
    n = len(y)
    at = np.arange(n)  # 0 is no step at all
    before, total = np.concatenate([[0.0], np.cumsum(y)[:-1]]), y.sum()
    low = before / np.maximum(at, 1)
    high = (total - before) / (n - at)
    left = (y**2).sum() - at * low**2 - (n - at) * high**2
    best = int(np.argmin(left))
    level = float(low[best] if best else 0.0)
    return float(_score(left[best], n, 3)), best, level, float(high[best])


def _best_slope(y: FloatArray) -> tuple[float, float, float]:
    """Return the score of the best slope between two levels, and the levels."""
    n = len(y)
    bends = np.unique(np.linspace(0, n - 1, _BENDS).round().astype(int))
    at, until = np.triu_indices(len(bends), k=1)
    begin, end = bends[at], bends[until]
    is_long = end - begin >= max(3, n // 6)
    begin, end = begin[is_long], end[is_long]
    course = np.clip((np.arange(n) - begin[:, None]) / (end - begin)[:, None], 0.0, 1.0)
    middle = course.mean(axis=1)
    course -= middle[:, None]
    squares = (course**2).sum(axis=1)
    moment = course @ (y - y.mean())
    left = ((y - y.mean()) ** 2).sum() - moment**2 / squares
    best = int(np.argmin(left))
    rise = moment[best] / squares[best]
    low = float(y.mean() - rise * middle[best])
    return float(_score(left[best], n, 3)), low, low + float(rise)


def _two_levels(y: FloatArray) -> tuple[float, tuple[float, float]]:
    """Return the score of two levels that alternate, and the levels; at least two changes.

    Changes are found as by Viterbi's algorithm: each costs what the score takes for a parameter, so
    a single block beyond the middle is none.
    """
    is_high = y > (y.min() + y.max()) / 2
    left = np.inf
    for _ in range(_MOST_ROUNDS):
        if is_high.all() or not is_high.any():
            return np.inf, (0.0, 0.0)
        levels = float(y[~is_high].mean()), float(y[is_high].mean())
        before, left = left, float(((y - np.where(is_high, levels[1], levels[0])) ** 2).sum())
        if left >= before:
            break
        is_high = _segmented(y, levels, 2 * np.log(len(y)) * left / len(y))
    changes = int((is_high[1:] != is_high[:-1]).sum())
    if changes < 2:
        return np.inf, levels
    return float(_score(left, len(y), 2 + changes)), levels


def _segmented(y: FloatArray, levels: tuple[float, float], change: float) -> np.ndarray:
    """Return which blocks are at the high level, where a change costs that much in squares."""
    off = ((y[:, None] - np.array(levels)) ** 2).tolist()
    low, high = off[0]
    came: list[tuple[bool, bool]] = []  # whether the block before is at the high level
    for of_low, of_high in off[1:]:
        came.append((high + change < low, high <= low + change))
        low, high = min(low, high + change) + of_low, min(high, low + change) + of_high
    at = high < low
    path = [at]
    for of_low_came, of_high_came in reversed(came):
        at = of_high_came if at else of_low_came
        path.append(at)
    return np.array(path[::-1])


def _alternates(slower: FloatArray) -> bool:
    """Return whether single steps are of two kinds, too short to be seen in blocks."""
    later = slower[np.argmax(slower > 0.5 * np.percentile(slower, 90)) :]
    if len(later) < _FEWEST:
        return False
    cut = later.mean()
    low, high = later[later <= cut], later[later > cut]
    gap = high.mean() - low.mean() if len(high) else 0.0
    noise = max(low.std(), high.std()) if len(high) else 0.0
    return bool(gap > 4 * noise and low.mean() < _LOW * high.mean())


_SIZE = 10  # rows of a block
_RESTS = 1  # the second shortest of them: others may be longer for any reason
_FEWEST_BLOCKS = 3  # blocks
_LEAST_GROWTH = 0.08  # of what was usual: by at least so much it has to become longer
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
        rows[len(rows) % _SIZE :].reshape(-1, _SIZE, *rows.shape[1:]), _RESTS, axis=1
    )[:, _RESTS]
    number = min(len(blocks), round(num_newest / _SIZE))
    if number < _FEWEST_BLOCKS:
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
    if not at or after < (1 + _LEAST_GROWTH) * before:
        return 0
    for near in (2, max(2, len(usual) // 6)):  # at once, and over some time
        change = levels[at : at + near].mean(axis=0) - levels[max(0, at - near) : at].mean(axis=0)
        num_changed = int((change >= _CHANGED * change.max()).sum())
        has_moved = change.min() < -_CHANGED * change.max()  # from one rank to another
        is_clear = change.max() >= _CHANGED * (after - before) and not has_moved
        if is_clear and 2 * num_changed <= len(change):
            return at
    return 0
