"""Shares as ranges of whole elements that cover every byte exactly once."""

from __future__ import annotations

import numpy as np

from ..._types import Cluster, FloatArray, IntArray
from ...solve import apportion
from ._aggregation import Aggregation
from ._duration import check_shares


def byte_edges(aggregation: Aggregation, *, shares: FloatArray) -> IntArray:
    """Return where each rank's range of bytes begins and ends.

    Rank r sums the bytes from ``edges[r]`` up to ``edges[r + 1]``. The ranges follow each other in
    rank order, begin and end at whole elements, and cover all bytes. One below
    ``aggregation.min_bytes`` is empty and its bytes are shared out among the others: the smallest
    share goes first, at equal ones the higher rank's, until all that are left are large enough.
    One server always keeps all. Elements go by largest remainder, so a range is less than one
    element away from its share of those that are left.

    Args:
        aggregation: the bytes, the size of an element, and the least bytes of a range.
        shares: as ``exchange_s`` takes them, ``(world_size,)``.

    Returns:
        Bytes, from 0 to ``aggregation.num_bytes``, never falling, ``(world_size + 1,)``. Decide
        them on one rank and send them on: another CPU may round otherwise.

    Raises:
        ValueError: the shares are none of this aggregation's.
    """
    check_shares("byte_edges", aggregation, shares)
    total = aggregation.num_bytes // aggregation.element_bytes
    least = -(-aggregation.min_bytes // aggregation.element_bytes)
    kept = _large_enough(np.asarray(shares, np.float64), least / total)
    # A split of elements instead of samples: the same integers, with the same bounds.
    elements = np.zeros(aggregation.world_size, np.int64)
    cluster = Cluster(len(kept), total, min(least, total // len(kept)))
    elements[kept] = apportion(shares[kept], cluster)
    edges = np.zeros(aggregation.world_size + 1, np.int64)
    np.cumsum(elements * aggregation.element_bytes, out=edges[1:])
    return edges


def _large_enough(shares: FloatArray, least: float) -> IntArray:
    """Return the ranks whose shares are, once those below are gone, in ascending order."""
    order = np.argsort(-shares, kind="stable")
    order = order[shares[order] > 0]
    among_larger = shares[order] / np.cumsum(shares[order])
    fits = np.flatnonzero(among_larger >= least * (1 - 1e-12))
    num_kept = int(fits[-1]) + 1 if len(fits) else 1
    kept: IntArray = np.sort(order[:num_kept])
    return kept
