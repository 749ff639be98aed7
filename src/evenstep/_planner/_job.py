"""What is planned for: how many workers, how many samples, within which limits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .._types import Cluster, IntArray
from ..exceptions import invalid
from ._bounds import Bounds


@dataclass(frozen=True, slots=True)
class Job:
    """What a planner plans for.

    Attributes:
        world_size: number of workers.
        global_batch_size: samples of a full step.
        tail_size: samples of the short last step of an epoch; 0 if there is none.
        bounds: limits on every worker's samples.
        smallest: what ``Bounds(min="auto")`` stands for.
        tail_smallest: smallest local batch in the short last step, 0 where none is needed.
        cuts: whether the loop takes micro-batches, so that caps limit one forward and not the
            whole local batch.
        min_forwards: fewest micro-batches of a rank in a step of such a loop.
        most: largest local batches, one each, in place of ``bounds.max``; 0 is no samples at all.
    """

    world_size: int
    global_batch_size: int
    tail_size: int = 0
    bounds: Bounds = field(default_factory=Bounds)
    smallest: int = 1
    tail_smallest: int = 0
    cuts: bool = False
    min_forwards: int = 1
    most: tuple[int, ...] | None = None

    def caps(self) -> IntArray | None:
        """Return the largest sizes that were given, ``(world_size,)``; None if none were."""
        if self.most is not None:
            return np.array(self.most, np.int64)
        return self.bounds.caps(self.world_size)

    def cluster(self, caps: IntArray | None) -> Cluster:
        """Return what the policy plans for, with no worker above ``caps`` in one forward.

        Raises:
            ValueError: the bounds leave no way to split the global batch.
        """
        cluster = self.bounds.cluster(
            self.world_size,
            self.global_batch_size,
            smallest=self.smallest,
            caps=None if self.cuts else caps,
            min_forwards=self.min_forwards,
        )
        if self._by_count and caps is not None and (caps < self.bounds.forward_size).any():
            raise invalid(
                "Bounds(granularity=...)",
                f"fit into every worker's memory with `vary='count'`, {caps.tolist()} samples",
                self.bounds.forward_size,
                "Lower it: every forward has that many samples.",
            )
        return cluster

    def max_forward(self, batch_size: IntArray, caps: IntArray | None) -> IntArray | None:
        """Return the most samples that each worker puts through one forward; None is all it has.

        Args:
            batch_size: the local batches, ``(world_size,)``.
            caps: most samples that fit at once, ``(world_size,)``; None is no cap.
        """
        if not self.cuts:
            return None
        if self._by_count:
            return np.full(self.world_size, self.bounds.forward_size)
        if self.min_forwards == 1:
            return caps
        granule = np.asarray(self.bounds.granularity, dtype=np.int64)
        share: IntArray = -(-np.maximum(batch_size, 1) // (granule * self.min_forwards)) * granule
        return share if caps is None else np.minimum(share, caps)

    @property
    def tail_granularity(self) -> int:
        """Samples that keep together in the short last step too: those of a fixed forward."""
        return self.bounds.forward_size if self._by_count else 1

    @property
    def _by_count(self) -> bool:
        return self.cuts and self.bounds.vary == "count"
