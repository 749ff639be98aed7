"""Checks of what a policy decided, before it takes effect."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._types import Cluster, Decision


def check_decision(decision: Decision[Any], cluster: Cluster, *, name: str) -> None:
    """Raise unless the sizes can be run as they are.

    Args:
        decision: of the policy.
        cluster: what it planned for.
        name: of the policy, for the words.

    Raises:
        TypeError: it is no decision, or its sizes are no array.
        ValueError: they are no integers, do not add up or break the bounds.
    """
    if not isinstance(decision, Decision):
        raise TypeError(f"{name} gave {decision!r}, not a `Decision`")
    sizes = decision.batch_size
    if not isinstance(sizes, np.ndarray):
        raise TypeError(f"{name} gave {sizes!r}, not an array of {cluster.world_size} integers")
    if not np.issubdtype(sizes.dtype, np.integer) or sizes.shape != (cluster.world_size,):
        raise ValueError(f"{name} gave {sizes!r}, not {cluster.world_size} integers")
    if sizes.sum() != cluster.global_batch_size:
        raise ValueError(
            f"{name} gave {sizes.tolist()}, which add up to {sizes.sum()} and not to the "
            f"global batch of {cluster.global_batch_size}"
        )
    if not 0 <= decision.level <= 1:
        raise ValueError(f"{name} gave a level of {decision.level!r}, not a share in [0, 1]")
    outside = (sizes < cluster.min_batch_size) | (sizes > cluster.max_batch_size)
    if outside.any():
        rank = int(np.argmax(outside))
        raise ValueError(
            f"{name} gave rank {rank} {sizes[rank]} samples, outside "
            f"{cluster.min_batch_size[rank]} to {cluster.max_batch_size[rank]}"
        )
