"""The short last batch of an epoch, shared out like the full ones."""

from __future__ import annotations

import numpy as np

from .._types import Cluster, IntArray
from ..solve._apportion import apportion


def split_tail(
    batch_size: IntArray,
    num_samples: int,
    caps: IntArray | None,
    *,
    smallest: int = 0,
    granularity: int = 1,
) -> IntArray:
    """Return how many of the last ``num_samples`` each worker computes.

    In proportion to ``batch_size``, by largest remainder. Every worker that has samples in a full
    step gets at least one, where there are as many samples as such workers. With fewer, some get
    none, and run a stand-in of weight 0. Other smallest sizes do not bind, since no split of so
    few might keep them. What fits in memory does bind.

    Args:
        batch_size: sizes of the full steps, ``(world_size,)``.
        num_samples: samples left, at least 1 and fewer than the sizes add up to.
        caps: most samples for each worker, ``(world_size,)``; None is no cap.
        smallest: fewest samples for any worker, where its model needs some and they fit.
        granularity: samples that come and go together here too, where every forward is to have
            the same number. One worker carries what is left of one. Given up where there are
            fewer such forwards than workers, and enough samples.

    Returns:
        Local sizes, ``(world_size,)``, adding up to ``num_samples``.
    """
    one_each = np.minimum(batch_size, 1)
    wanted = np.maximum(one_each, smallest)
    if caps is not None:
        wanted = np.minimum(wanted, caps)
    for granule in (granularity, 1):
        for least in (wanted, one_each):
            needed = -(-least // granule)
            if needed.sum() <= -(-num_samples // granule):
                return _in_granules(batch_size, num_samples, caps, needed, granule)
    return _in_granules(batch_size, num_samples, caps, np.zeros_like(one_each), granularity)


def _in_granules(
    batch_size: IntArray, num_samples: int, caps: IntArray | None, least: IntArray, granule: int
) -> IntArray:
    """Return the split in whole granules, but for one worker that carries what is left of one.

    Args:
        batch_size: what the shares are in proportion to, ``(world_size,)``.
        num_samples: samples left.
        caps: most samples for each worker, ``(world_size,)``; None is no cap.
        least: fewest granules for each worker, ``(world_size,)``.
        granule: samples of one.
    """
    num_granules = -(-num_samples // granule)
    most = None if caps is None else -(-caps // granule)
    last = Cluster(len(batch_size), num_granules, min_batch_size=least, max_batch_size=most)
    shares = np.maximum(batch_size, 1e-9).astype(np.float64)
    sizes = apportion(shares, last) * granule
    sizes[np.argmax(sizes / shares)] -= num_granules * granule - num_samples
    return sizes
