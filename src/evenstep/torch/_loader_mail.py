"""What ranks send each other about a loader, from any thread and without a collective."""

from __future__ import annotations

from collections.abc import Callable

from .._exchange._mailbox import Mailbox
from .._types import IntArray
from ._exchange._side_group import Alone, SideGroup


class LoaderMail:
    """One loader's way to the other ranks, over the side channel, once the run is open.

    A prefetching thread of the user's may ask for a batch while the main thread is in a
    collective: so this is none. Peers, which get the very same batches, do as their first.

    Args:
        mailbox: sends messages of this rank to the others, once it is connected.
        side: the ranks.
        number: of the loader among those of its balancer.
    """

    def __init__(
        self, mailbox: Callable[[], Mailbox], side: SideGroup | Alone, number: int
    ) -> None:
        self.rank = side.rank
        self.world_size = side.world_size
        self._mailbox = mailbox
        self._side = side
        self._number = number
        self._num_rounds = 0

    def check(self) -> None:
        """Raise if a worker was lost."""
        self._mailbox().check()

    def share(self, key: tuple[int, int], ints: IntArray | None) -> IntArray:
        """Return on every rank the integers that rank 0 calls it with; None on the others.

        Args:
            key: which round, later ones with larger numbers, and which message of it.
            ints: the integers.
        """
        agreed = self._mailbox().share((self._number, *key), ints)
        return agreed if self._side.peers is None else self._side.peers.share(agreed)

    def gather(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        """Send ``numbers``, as many on every rank, and return what waits for those of all."""
        # Under a name of its own: blocks of an order have numbers of theirs.
        self._num_rounds += 1
        return self._mailbox().gather((~self._number, self._num_rounds, 0), numbers)
