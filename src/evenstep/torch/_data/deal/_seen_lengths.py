"""Lengths that ranks see as they train: each its own, and all of them from the next epoch on."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np

from ...._planner import UNKNOWN, SampleCosts
from ...._types import IntArray
from ....exceptions import invalid
from .._protocols import LoaderRanks

_LENGTH_BITS = 30  # of a length, whose square is a feature; the index is above it
_CHUNK = 1 << 16  # samples in one message, between which others pass
_STORED = "<i4"


@final
class SeenLengths:
    """The lengths of a data set, which become known as its samples are handed out.

    What a rank sees counts from the begin of the next epoch on, when every rank tells all others:
    so the tables of all ranks are equal in every step, and no step waits for it. A message of 8
    bytes for each sample that was seen is sent once an epoch.

    A checkpoint holds the table of the last epoch's begin. What was seen since is lost with a run
    that is stopped: those samples count as the mean one until they are seen again.

    Args:
        costs: are corrected.
        ranks: that train.
    """

    def __init__(self, costs: SampleCosts, ranks: LoaderRanks) -> None:
        self._costs = costs
        self._ranks = ranks
        self._news: list[IntArray] = []
        self._text: str | None = None

    def record(self, indices: IntArray, lengths: IntArray) -> None:
        """Take in the lengths of samples that are handed out, by their index in the data set."""
        most = (1 << _LENGTH_BITS) - 1
        self._news.append(indices << _LENGTH_BITS | np.minimum(lengths, most))

    def merge(self) -> None:
        """Have all ranks know what each has seen. They come here at the begin of an epoch."""
        mine = np.concatenate([np.zeros(0, np.int64), *self._news])
        self._news = []
        for told in _of_all(self._ranks, mine) if self._ranks.world_size > 1 else [mine]:
            if len(told):
                self._text = None
                self._costs.correct(told >> _LENGTH_BITS, told & ((1 << _LENGTH_BITS) - 1))

    def written(self) -> str:
        """Return what all ranks know, as text; empty where that is nothing."""
        if self._text is None:
            table = self._costs.lengths.astype(_STORED)
            packed = zlib.compress(table.tobytes(), 1)
            self._text = base64.b64encode(packed).decode() if self._costs.is_known else ""
        return self._text

    def restore(self, text: str) -> None:
        """Take in what ``written`` returned."""
        if text:
            self._text = None
            table = _read(text)
            known = np.flatnonzero(table != UNKNOWN)
            self._costs.correct(known, table[known])

    def check(self, text: object) -> str:
        """Return ``text`` if it can be restored.

        Raises:
            ValueError: it is damaged, or of another data set.
        """
        num_samples = len(self._costs.lengths)
        try:
            if isinstance(text, str) and (not text or len(_read(text)) == num_samples):
                return text
        except (ValueError, zlib.error):
            pass
        raise invalid(
            "BalancedLoader.load_state_dict(state=...)",
            f"have lengths of {num_samples} samples",
            "damaged ones, or those of another data set",
            "Leave out the state's `lengths`: they become known again in an epoch.",
        )


def _of_all(ranks: LoaderRanks, mine: IntArray) -> Iterator[IntArray]:
    """Yield what all ranks have to tell, in chunks that are the same on each."""
    counts = [count for (count,) in ranks.gather([len(mine)])()]
    for first in range(0, max(counts), _CHUNK):
        size = min(max(counts) - first, _CHUNK)
        own = mine[first : first + size]
        rows = ranks.gather([*own.tolist(), *[UNKNOWN] * (size - len(own))])()
        yield merged(rows, [min(max(count - first, 0), size) for count in counts])


def merged(rows: Sequence[Sequence[int]], counts: Sequence[int]) -> IntArray:
    """Return the first so many numbers of each row, one row after the other."""
    table = np.array(rows, np.int64)
    return table[np.arange(table.shape[1]) < np.array(counts)[:, None]]


def _read(text: str) -> IntArray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), _STORED)
