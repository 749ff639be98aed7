"""Who takes how many samples of a stream next: integers that every rank finds for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from ...._planner import Cost
from ....exceptions import invalid
from ....solve._allocate import scaled

StreamKind = Literal["same", "sharded"]


class StreamStock(NamedTuple):
    """What a rank says about its stream before every step.

    Attributes:
        num_samples: samples it has read and not handed out.
        ended: whether there are no more, 1 or 0.
        mark: made of its first samples; -1 if none could be made, -2 if there is no sample.
        num_readers: processes among which it splits its stream.
        lengths: a number made of those of the next step's samples; 0 where they are counted.
    """

    num_samples: int
    ended: int
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


def check_cost(cost: Cost) -> None:
    """Raise where ``cost`` says nothing of samples without an index, or not if they are padded."""
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
