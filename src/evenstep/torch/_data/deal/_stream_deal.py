"""Who takes how many samples of a stream next: integers that every rank finds for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from ...._planner import UNKNOWN, Cost, Plan, SampleCosts
from ...._types import IntArray
from ....exceptions import invalid
from ....solve._allocate import scaled
from .._protocols import LoaderRanks
from ._by_cost import Assigned, CostDeal

StreamKind = Literal["same", "sharded"]


@dataclass(frozen=True, slots=True)
class StreamStock:
    """What a rank says about its stream before every step.

    Attributes:
        num_samples: samples it has read and not handed out.
        ended: whether there are no more.
        mark: made of its first samples; -1 if none could be made, -2 if there is no sample.
        num_readers: processes among which it splits its stream.
        lengths: a number made of those of the next step's samples; 0 where they are counted.
    """

    num_samples: int
    ended: bool
    mark: int
    num_readers: int = 1
    lengths: int = 0


@final
@dataclass(frozen=True, slots=True)
class SameStream:
    """Every rank reads the same samples in the same order, and takes those at its positions.

    Attributes:
        global_batch_size: samples of a full step.
    """

    global_batch_size: int

    def ahead(self, batch_size: int) -> int:
        """Return how many samples a rank reads ahead of its next step."""
        return self.global_batch_size

    def lacks(self, stocks: Sequence[StreamStock], batch_size: Sequence[int]) -> bool:
        """Return whether a rank has to read on before it knows what it can give."""
        return False

    def sizes(self, stocks: Sequence[StreamStock], batch_size: Sequence[int]) -> tuple[int, ...]:
        """Return the samples of every rank in the next step; all 0 at the end."""
        left = min(stocks[0].num_samples, self.global_batch_size)
        if left == self.global_batch_size:
            return tuple(batch_size)
        return tuple(scaled(left, batch_size).tolist())

    def passed(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return by how many samples every rank's stream moves on in a step of these sizes."""
        return [sum(sizes)] * len(sizes)

    def first(self, sizes: Sequence[int], rank: int) -> int:
        """Return where among those the samples of ``rank`` begin."""
        return sum(sizes[:rank])

    def problem(self, stocks: Sequence[StreamStock]) -> str | None:
        """Return why the stream cannot continue, or None."""
        readers = [stock.num_readers for stock in stocks]
        if len(set(readers)) > 1:  # among whom a stream splits itself is part of its order
            return (
                f"with `stream='same'` all ranks need as many loader workers, and they have "
                f"{readers}: each would read another order. Give "
                f"`DataLoader(num_workers={min(readers)})` on all of them."
            )
        left = [min(stock.num_samples, self.global_batch_size) for stock in stocks]
        if len(set(left)) == 1 and len({stock.lengths for stock in stocks}) == 1:
            return None
        if len(set(left)) == 1:
            return (
                "ranks find different lengths in the next step's samples, so they would not agree "
                "who computes which. With `Balancer(cost=...)` and `stream='same'`, draw what "
                "changes lengths from a seed that all ranks share, or leave `cost` out."
            )
        return (
            f"ranks read streams of different lengths: {left} samples are left on them. With "
            f"`stream='same'` each has to read all samples, in one order. If each reads its own "
            f"shard, prepare with `stream='sharded'`."
        )

    def doubt(self, stocks: Sequence[StreamStock]) -> str | None:
        """Return what is likely a mistake, judged by the first samples, or None."""
        if len({stock.mark for stock in stocks}) == 1:
            return None
        return (
            "With `stream='same'` every rank has to read the same samples in the same order, but "
            "the first ones differ. If each rank reads its own shard, prepare with "
            "`stream='sharded'`; if the order is shuffled, seed it alike. Samples would be left "
            "out and repeated. (Where augmentation alone differs, all is well.)"
        )


@final
@dataclass(frozen=True, slots=True)
class OwnShards:
    """Every rank reads samples of its own, as many as the plan says and its shard still has.

    It answers what ``SameStream`` does.

    Attributes:
        global_batch_size: samples of a full step.
    """

    global_batch_size: int

    def ahead(self, batch_size: int) -> int:
        # What plans rarely outgrow in one step. One that does costs a moment of waiting.
        return 2 * max(batch_size, 1)

    def lacks(self, stocks: Sequence[StreamStock], batch_size: Sequence[int]) -> bool:
        return any(
            not stock.ended and stock.num_samples < size
            for stock, size in zip(stocks, batch_size, strict=True)
        )

    def sizes(self, stocks: Sequence[StreamStock], batch_size: Sequence[int]) -> tuple[int, ...]:
        held = [stock.num_samples for stock in stocks]
        sizes = tuple(map(min, held, batch_size))
        if any(sizes):
            return sizes
        # What is left belongs to ranks for which the plan has nothing.
        fair, room = max(self.global_batch_size // len(stocks), 1), self.global_batch_size
        rest = []
        for left in held:
            rest.append(min(left, fair, room))
            room -= rest[-1]
        return tuple(rest)

    def passed(self, sizes: Sequence[int]) -> Sequence[int]:
        return sizes

    def first(self, sizes: Sequence[int], rank: int) -> int:
        return 0

    def problem(self, stocks: Sequence[StreamStock]) -> str | None:
        empty = [rank for rank, stock in enumerate(stocks) if stock.mark == -2]
        if not empty:
            return None
        return (
            f"the shards of ranks {empty} have not a single sample, so there is nothing they could "
            f"run a step on beside the others. Give every rank a part of the stream."
        )

    def doubt(self, stocks: Sequence[StreamStock]) -> str | None:
        marks = {stock.mark for stock in stocks}
        if len(stocks) == 1 or len(marks) > 1 or marks <= {-1, -2}:
            return None
        return (
            "With `stream='sharded'` every rank has to read samples of its own, but the first ones "
            "are the same on all: each sample would count once for every rank. Split the stream "
            "by `torch.distributed.get_rank()`, or prepare with `stream='same'`."
        )


@final
class StreamDeal:
    """Assigns the samples of a step by their lengths, which every rank has seen.

    All ranks read the same samples, so they find the same assignment, and compare its checksum.

    Args:
        cost: names what gives the length of a sample.
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
