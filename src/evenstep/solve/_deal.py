"""Slots of a global step dealt to ranks, changing owner as rarely as can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .._types import IntArray, sizes_of
from ..exceptions import invalid

# Former owners remembered per slot. With fewer a slot still goes to a rank that gains; only the
# preference for a rank that held it before is lost. Four cost 64 bytes a slot.
DEPTH = 4


@final
@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    r"""Which slot of a global step belongs to which rank.

    A step has as many slots as the global batch has samples; slot $j$ of step $k$ is position
    $kB + j$ of the order. ``fresh`` deals them out in rank order, and ``move`` to new batch sizes
    hands over exactly $\sum_r |\Delta b_r| / 2$ slots, the fewest possible.

    Which ones follows the last in, first out: a rank that loses gives back what it gained most
    recently, its original slots last and from their end; a rank that gains takes first what it
    held most recently before, then the lowest slots left. So a plan that swings to and fro moves
    the same few slots, and what was fetched for a slot stays of use.

    A value made of integers alone: ranks which replay the same batch sizes hold the same deal,
    whatever their CPUs. Not to be skipped, then: every rank moves through every plan, in order.

    Attributes:
        owner: rank of every slot, read-only, ``(global_batch_size,)``.
        world_size: number of ranks.
        num_moves: how often the deal has moved.
        gained: when its owner gained each slot, as an increasing number, ``(global_batch_size,)``.
        former: ranks that held each slot before, newest first and each at most once, -1 where
            there were fewer, ``(global_batch_size, DEPTH)``.
        lost: the number of the move in which that rank lost it, ``(global_batch_size, DEPTH)``.
    """

    owner: IntArray
    world_size: int
    num_moves: int
    gained: IntArray
    former: IntArray
    lost: IntArray

    def __post_init__(self) -> None:
        for array in (self.owner, self.gained, self.former, self.lost):
            array.flags.writeable = False

    @classmethod
    def fresh(cls, batch_size: IntArray) -> Deal:
        """Return contiguous slots, rank 0's first.

        Args:
            batch_size: slots of every rank, at least 0 each, ``(world_size,)``.

        Raises:
            ValueError: the sizes are no integers, or one is negative.
        """
        sizes = sizes_of("Deal.fresh(batch_size=...)", batch_size)
        num_slots = int(sizes.sum())
        return cls(
            owner=np.repeat(np.arange(len(sizes)), sizes),
            world_size=len(sizes),
            num_moves=0,
            gained=np.arange(num_slots) - num_slots,
            former=np.full((num_slots, DEPTH), -1),
            lost=np.zeros((num_slots, DEPTH), np.int64),
        )

    def move(self, batch_size: IntArray) -> Deal:
        """Return the deal in which every rank holds as many slots as its new batch size.

        Args:
            batch_size: slots of every rank, at least 0 each, with the sum they had before,
                ``(world_size,)``.

        Raises:
            ValueError: the sizes are no integers, negative, of another number of ranks, or add up
                to something else.
        """
        sizes = sizes_of("Deal.move(batch_size=...)", batch_size)
        self._check(sizes)
        change = sizes - np.bincount(self.owner, minlength=self.world_size)
        if not change.any():
            return self
        released = self._release(np.maximum(-change, 0))
        slots, ranks = self._hand_out(released, np.maximum(change, 0))
        return self._with_owners(slots, ranks)

    def slots(self, rank: int) -> IntArray:
        """Return the slots of ``rank``, ascending."""
        return np.flatnonzero(self.owner == rank)

    def _check(self, sizes: IntArray) -> None:
        name = "Deal.move(batch_size=...)"
        if len(sizes) != self.world_size:
            remedy = "A cluster of another size starts from `Deal.fresh`."
            raise invalid(name, f"have {self.world_size} entries", len(sizes), remedy)
        if int(sizes.sum()) != len(self.owner):
            remedy = "Another global batch starts from `Deal.fresh`."
            raise invalid(name, f"add up to {len(self.owner)}", int(sizes.sum()), remedy)

    def _release(self, losses: IntArray) -> IntArray:
        """Return the slots that every rank gained last, ``losses`` of each, ascending."""
        held = np.flatnonzero(losses[self.owner] > 0)
        newest_first = held[np.lexsort((-self.gained[held], self.owner[held]))]
        owner = self.owner[newest_first]
        released: IntArray = np.sort(newest_first[_place(owner) < losses[owner]])
        return released

    def _hand_out(self, released: IntArray, gains: IntArray) -> tuple[IntArray, IntArray]:
        """Return the released slots in the order in which they are gained, and by whom."""
        slots, ranks = [], []
        for age in range(DEPTH):  # a slot goes to its newest former owner that still gains
            rank = self.former[released, age]
            fits = np.flatnonzero((rank >= 0) & (gains[rank] > 0))
            if not len(fits):
                continue
            lost = self.lost[released[fits], age]
            fits = fits[np.lexsort((-lost, rank[fits]))]
            taken = fits[_place(rank[fits]) < gains[rank[fits]]]
            slots.append(released[taken])
            ranks.append(rank[taken])
            gains = gains - np.bincount(rank[taken], minlength=self.world_size)
            released = np.delete(released, taken)
        slots.append(released)
        ranks.append(np.repeat(np.arange(self.world_size), gains))
        return np.concatenate(slots), np.concatenate(ranks)

    def _with_owners(self, slots: IntArray, ranks: IntArray) -> Deal:
        """Return the deal after ``ranks`` gained ``slots``, in this order."""
        owner, gained, former, lost = (
            array.copy() for array in (self.owner, self.gained, self.former, self.lost)
        )
        leaving = self.owner[slots]
        # The one that leaves goes to the front; the one that comes, or else the oldest, drops out.
        drop = np.where(self.former[slots] == ranks[:, None], np.arange(DEPTH), DEPTH - 1)
        kept = np.arange(DEPTH) != drop.min(axis=1)[:, None]
        shape = (len(slots), DEPTH - 1)
        former[slots, 1:] = self.former[slots][kept].reshape(shape)
        lost[slots, 1:] = self.lost[slots][kept].reshape(shape)
        former[slots, 0], lost[slots, 0] = leaving, self.num_moves + 1
        owner[slots] = ranks
        gained[slots] = self.num_moves * len(owner) + np.arange(len(slots))
        return Deal(owner, self.world_size, self.num_moves + 1, gained, former, lost)


def _place(group: NDArray[Any]) -> IntArray:
    """Return each entry's place within its run of equal neighbours, from 0."""
    index = np.arange(len(group))
    starts = np.concatenate([[True], group[1:] != group[:-1]]) if len(group) else index == -1
    place: IntArray = index - np.maximum.accumulate(np.where(starts, index, 0))
    return place
