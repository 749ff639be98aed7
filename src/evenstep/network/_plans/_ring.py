"""What plain all-reduce takes: a ring of all workers."""

from __future__ import annotations

import numpy as np

from ._aggregation import Aggregation
from ._bandwidths import Links, check_world


def ring_s(aggregation: Aggregation, links: Links) -> float:
    r"""Return the seconds of a ring all-reduce among the workers, in the order of their ranks.

    $2 \frac{N - 1}{N} \frac{V}{\text{slowest link}} + 2 (N - 1) \alpha$: each worker sends that
    much to the next, so the order matters only where pairs differ. Half duplex, a worker sends
    and receives in turn.

    It is what a ring costs that is pipelined without gaps; gloo's all-reduce was measured to take
    1.1 to 1.3 times that on shaped links. Libraries pick trees and other algorithms too.

    Args:
        aggregation: the bytes and the workers. Ranks that only serve are left out.
        links: their bandwidths.

    Raises:
        ValueError: the links are of other ranks.

    References:
        P. Patarasuk and X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of
        workstations*, 2009.
    """
    check_world("ring_s", aggregation, links)
    ring = np.flatnonzero(aggregation.is_worker)
    if len(ring) == 1:
        return 0.0
    after = np.roll(ring, -1)
    hops = np.minimum(links.up_bytes_per_s[ring], links.down_bytes_per_s[after])
    if links.pair_bytes_per_s is not None:
        hops = np.minimum(hops, links.pair_bytes_per_s[ring, after])
    slowest = min(float(hops.min()), float(links.bandwidth_bytes_per_s[ring].min()))
    rounds = 2 * (len(ring) - 1)
    return rounds / len(ring) * aggregation.num_bytes / slowest + rounds * links.latency_s
