"""Whether all workers read the same samples in the same order, by checksums of every epoch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .._exchange._world_check import listed
from ..exceptions import invalid

_VARIED = 8  # distinct values from which on a part of the samples says something of their order
_ELEMENTS = 256  # of a part that a checksum is of, spread over it

Row = list[Any]  # of a part: checksum in order, checksum in any order, is it varied, is it steady


class Tally:
    """Checksums of the samples that this worker has read in an epoch, one row for each part.

    Args:
        repeats: whether a part that is the same in two epochs is so because the pipeline makes no
            random content, and not because it keeps what it has made.
    """

    def __init__(self, *, repeats: bool) -> None:
        self._repeats = repeats
        self._before: list[int] = []
        self._parts: list[tuple[int, int, set[int]]] = []

    def begin(self) -> None:
        """Begin an epoch."""
        self._before = [in_any_order for _, in_any_order, _ in self._parts]
        self._parts = []

    def add(self, samples: Any) -> None:
        """Count samples, stacked and nested as the user's."""
        parts = tf.nest.flatten(samples)
        if not self._parts:
            self._parts = [(0, 0, set()) for _ in parts]
        for place, part in enumerate(parts):
            in_order, in_any_order, distinct = self._parts[place]
            rows = _bytes(part)
            each = list(map(zlib.crc32, rows))
            in_order = zlib.crc32(b"".join(rows) if isinstance(rows, list) else rows, in_order)
            in_any_order += sum(each)
            if len(distinct) < _VARIED:
                distinct.update(each)
            self._parts[place] = in_order, in_any_order, distinct

    def rows(self) -> list[Row]:
        """Return a row for each part: plain values, to be compared by ``difference``."""
        return [
            [
                in_order,
                in_any_order,
                len(distinct) >= _VARIED,
                self._repeats and self._before[place : place + 1] == [in_any_order],
            ]
            for place, (in_order, in_any_order, distinct) in enumerate(self._parts)
        ]


def check_same_samples(said: Sequence[list[Row]]) -> None:
    """Raise if workers have certainly read other samples than each other, or in another order.

    Of one part of the samples the same values in another order say so, or values that each worker
    finds again in every epoch and the others do not have. What else differs is content drawn at
    random, as by augmentation, and every worker may draw its own. A part that is the same in order
    on all workers shows that they are in step, and so do none with hardly any distinct values.

    Raises:
        ValueError: they have; the message names the ranks.
    """
    for kind, groups in _findings(said):
        raise invalid(
            "Balancer.dataset(source)",
            "be a pipeline that gives the same samples in the same order on all workers",
            f"{kind} on {' | '.join(map(listed, groups))} in this epoch",
            "Iterate over it, or peek into it, on all workers or on none, as each iteration may "
            "shuffle anew; or give a function from the epoch's number to a pipeline. Read files in "
            "a fixed order, and shard nothing.",
        )


def _findings(said: Sequence[list[Row]]) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield what differs, and the ranks in groups of those who agree."""
    parts = [
        part for part in zip(*said, strict=True) if all(is_varied for _, _, is_varied, _ in part)
    ]
    if any(len({in_order for in_order, *_ in part}) == 1 for part in parts):
        return
    for part in parts:
        contents = {in_any_order for _, in_any_order, *_ in part}
        if len(contents) < len({(in_order, content) for in_order, content, *_ in part}):
            yield "another order", _groups([in_order for in_order, *_ in part])
        elif len(contents) > 1 and all(is_steady for *_, is_steady in part):
            yield "other samples", _groups([content for _, content, *_ in part])


def _groups(values: Sequence[int]) -> list[list[int]]:
    return [
        [rank for rank, value in enumerate(values) if value == each]
        for each in dict.fromkeys(values)
    ]


def _bytes(part: Any) -> Any:
    """Return a part of each sample as bytes, thinned out if it is large: an array, or a list."""
    rows = np.asarray(part)
    if rows.dtype == object:  # texts
        return [repr(row).encode() for row in rows.tolist()]
    flat = rows.reshape(len(rows), -1)
    thin = flat[:, :: -(-flat.shape[1] // _ELEMENTS) or 1]
    return np.ascontiguousarray(thin).view(np.uint8)
