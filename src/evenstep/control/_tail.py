"""The short last batch of an epoch, shared out like the full ones."""

from __future__ import annotations

import numpy as np

from .._apportion import apportion
from .._types import Cluster, IntArray


def split_tail(
    batch_size: IntArray,
    num_samples: int,
    caps: IntArray | None,
    *,
    smallest: int = 0,
    granularity: int = 1,
) -> IntArray:
    """Return how many of the last ``num_samples`` each worker computes.

    In proportion to ``batch_size``, by largest remainder. Smallest sizes and granules do not bind
    here, since no split of so few might keep them: a worker may get nothing, and then runs a
    dummy of weight 0. What fits in memory does bind.

    Args:
        batch_size: sizes of the full steps, ``(world_size,)``.
        num_samples: samples left, at least 1 and fewer than the sizes add up to.
        caps: most samples for each worker, ``(world_size,)``; None is no cap.
        smallest: fewest samples for any worker, where its model needs some.
        granularity: samples that come and go together here too, where every forward is to have
            the same number. One worker carries what is left of one.

    Returns:
        Local sizes, ``(world_size,)``, adding up to ``num_samples``.
    """
    last = Cluster(
        len(batch_size),
        num_samples,
        min_batch_size=smallest,
        max_batch_size=caps,
        granularity=granularity,
    )
    return apportion(np.maximum(batch_size, 1e-9).astype(np.float64), last)
