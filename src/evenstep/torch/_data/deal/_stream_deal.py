"""Who computes which samples of a stream's step by cost, where every rank has read all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from ...._planner import UNKNOWN, Cost, Plan, SampleCosts
from ...._types import IntArray
from ....exceptions import invalid
from .._protocols import LoaderRanks
from ._by_cost import Assigned, CostDeal


@final
class StreamDeal:
    """Assigns the samples of a step by their lengths, which every rank has seen.

    All ranks read the same samples, so they find the same assignment, and compare its checksum.

    Args:
        cost: names what tells the length of a sample.
        ranks: all of them.
        global_batch_size: samples of a full step.

    Attributes:
        costs: of the newest samples.

    Raises:
        ValueError: ``cost`` says nothing of samples without an index, or not if they are padded.
    """

    def __init__(self, cost: Cost, ranks: LoaderRanks, global_batch_size: int) -> None:
        self._cost = cost
        _check(cost)
        self.costs = SampleCosts(cost, np.full(2 * global_batch_size, UNKNOWN, np.int64))
        self._deal = CostDeal(self.costs, rank=ranks.rank, world_size=ranks.world_size)

    def begin(self, *, equal_forwards: bool) -> None:
        """Begin an epoch, in which all ranks make as many forwards if asked for."""
        self._deal.begin(self._places, equal_forwards=equal_forwards)

    def parts(self, plan: Plan, first: int, lengths: IntArray) -> list[IntArray] | None:
        """Return the slots of each of this rank's forwards in a step; None under a plan by count.

        Args:
            plan: in force.
            first: position of the step in the stream.
            lengths: of all samples of the step.

        Raises:
            ValueError: a sample is larger than a forward may be.
        """
        most = self._cost.max_size
        if most is not None and lengths.max() > most:
            raise invalid(
                "Cost(max_size=...)",
                "be at least the size of every sample",
                f"{most} where sample {first + int(lengths.argmax())} of the stream has "
                f"{lengths.max()}",
                "Cut the sample, leave it out, or raise the cap.",
            )
        self.costs.correct(self._places(first, len(lengths)), lengths)
        parts = None if plan.costs is None else self._deal.parts(plan, first, len(lengths))
        return None if parts is None else list(parts)

    def assigned(
        self, plan: Plan, parts: Sequence[IntArray], first: int, sizes: Sequence[int], *, full: bool
    ) -> Assigned:
        """Return what ranks compare of a step, and what this one computes of it by cost.

        Args:
            plan: in force.
            parts: slots of this rank's forwards.
            first: position of the step.
            sizes: samples of each rank by count.
            full: whether the step has the samples of a whole global batch.
        """
        own = [slots for slots in parts if len(slots)]
        return self._deal.assigned(plan, own, first, sum(sizes), sizes if full else None)

    def _places(self, first: int, num_samples: int) -> IntArray:
        """Return where the lengths of so many samples are kept: those of the newest steps are."""
        return np.arange(first, first + num_samples) % len(self.costs.lengths)


def _check(cost: Cost) -> None:
    if not (isinstance(cost.of, str) or callable(cost.of)):
        raise invalid(
            "Balancer(cost=...)",
            "name a field of each sample of a stream, or be a function of a sample",
            cost,
            "Its samples have no index, and are shared out before they are collated: give "
            '`Cost("input_ids", padded=...)`, say.',
        )
    if cost.padded is None:
        raise invalid(
            "Cost(padded=...)",
            "be True or False for a stream, of which no sample is read before training",
            None,
            'Say whether batches are padded to their longest sample: `Cost("input_ids", '
            "padded=True)`.",
        )
