"""One rank's side of the comparison: what it reduced goes to rank 0, which finds who differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ._channel import Message, StarChannel
from ._reductions import Differing, Reduced, Reductions


class Ways:
    """Sends what this rank's reductions were made of, before it waits for the others in them.

    Args:
        rank: this process.
        world_size: number of workers.
        channel: connections to the others; None with one process.
        differ: called on rank 0, from any thread, when ranks went different ways.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        channel: StarChannel | None,
        *,
        differ: Callable[[Differing], None],
    ) -> None:
        self._rank = rank
        self._is_alone = world_size == 1
        self._channel = channel
        self._differ = differ
        self._books = Reductions(world_size)  # on rank 0

    def along(self, reduced: Sequence[Reduced]) -> Message:
        """Return what goes along with a report to rank 0."""
        return {"reduced": [one.row() for one in reduced]} if reduced else {}

    def tell(self, reduced: Sequence[Reduced]) -> None:
        """Tell rank 0 of reductions outside of a report."""
        if not reduced or self._is_alone:
            return
        if self._rank != 0 and self._channel is not None:
            self._channel.send(0, self.along(reduced))
        else:
            self.received(0, self.along(reduced))

    def received(self, peer: int, message: Message) -> bool:
        """On rank 0: take in what a rank reduced; return whether the message says so."""
        rows = message.get("reduced")
        if rows is None:
            return False
        differing = self._books.take(peer, rows)
        if differing is not None:
            self._differ(differing)
        return True
