"""The part of an epoch's order that is drawn and not trained on yet."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from ..._types import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Neighbours in an order.

    Attributes:
        first: position of the first of them.
        end: position after the last.
        indices: what they are in the data set.
        checksum: of the order from its begin to the last of them.
    """

    first: int
    end: int
    indices: IntArray
    checksum: int


class OrderBlocks:
    """Blocks that follow each other: new ones are added, those trained on are dropped.

    One thread at a time adds and drops; any may read meanwhile.

    Args:
        first: position of the first index to come.
        checksum: of the order before it.

    Attributes:
        end: the position up to which the order is drawn.
    """

    def __init__(self, first: int = 0, checksum: int = 0) -> None:
        # Replaced and never changed, so that whoever looks at it needs no lock.
        self._blocks: tuple[Block, ...] = (Block(first, first, np.zeros(0, np.int64), checksum),)
        self.end = first

    def append(self, indices: IntArray) -> None:
        """Take in the indices that come next."""
        last = self._blocks[-1]
        checksum = zlib.crc32(indices.tobytes(), last.checksum)
        block = Block(last.end, last.end + len(indices), indices, checksum)
        self._blocks = (*self._blocks, block)
        self.end = block.end

    def drop(self, position: int) -> None:
        """Forget the blocks that end before ``position``, but for the newest."""
        *olds, newest = self._blocks
        self._blocks = (*(block for block in olds if block.end >= position), newest)

    def indices(self, first: int, num_samples: int) -> IntArray | None:
        """Return the indices from position ``first`` on; None if they are not drawn yet."""
        end = first + num_samples
        blocks = self._blocks
        if end > blocks[-1].end:
            return None
        for block in blocks:
            if block.first <= first and end <= block.end:
                return block.indices[first - block.first : end - block.first]
        parts = [
            block.indices[max(first - block.first, 0) : end - block.first]
            for block in blocks
            if block.first < end and block.end > first
        ]
        found: IntArray = np.concatenate(parts)
        assert len(found) == num_samples, "it was dropped"
        return found

    def checksum(self, position: int) -> tuple[int, int]:
        """Return how much of the order is covered by the checksum of ``position``, and that.

        By whole blocks, at least up to ``position`` and one of them: the same on all ranks,
        however far ahead of it they have drawn.
        """
        blocks = self._blocks
        covering = [block for block in blocks if block.end >= max(position, 1)]
        block = covering[0] if covering else blocks[-1]
        return block.end, block.checksum
