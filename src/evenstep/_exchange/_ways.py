"""One rank's side of the comparison: what it reduced goes to rank 0, which finds who differs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from ._channel import Message, StarChannel
from ._reductions import Differing, Reduced, Reductions
from ._unit_sums import Owner

Key = tuple[int, int]
"""A model's number, and that of its reduction."""


class Ways:
    """Sends what this rank's reductions were made of, before it waits for the others in them.

    Args:
        rank: this process.
        world_size: number of workers.
        channel: connections to the others; None with one process.
        changed: notified when an answer comes, and when a worker was lost.
        owner: knows which workers are lost.
        differ: called on rank 0, from any thread, when ranks went different ways.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        channel: StarChannel | None,
        changed: threading.Condition,
        *,
        owner: Owner,
        differ: Callable[[Differing], None],
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._channel = channel
        self._changed = changed
        self._owner = owner
        self._differ = differ
        self._books = Reductions(world_size)  # on rank 0
        self._asking: defaultdict[Key, set[int]] = defaultdict(set)  # on rank 0
        self._answers: dict[Key, list[int]] = {}
        self._awaited: set[Key] = set()
        self._has_asked = False  # on rank 0, for the reports that others hold

    def along(self, reduced: Sequence[Reduced]) -> Message:
        """Return what goes along with a report to rank 0."""
        return {"reduced": [one.row() for one in reduced]} if reduced else {}

    def tell(self, reduced: Sequence[Reduced]) -> None:
        """Tell rank 0 of reductions outside of a report."""
        if not reduced or self._world_size == 1:
            return
        if self._rank != 0 and self._channel is not None:
            self._channel.send(0, self.along(reduced))
        else:
            self.received(0, self.along(reduced))

    def steps_of(self, key: Key) -> list[int]:
        """Return the steps that a reduction may be of, as far as other ranks know; else none.

        For a rank that cannot tell which batch it has, in the backward of that reduction: others
        tell of it before they wait for this one.

        Raises:
            WorkerLostError: a worker was lost before it told.
            RanksDivergedError: ranks went different ways.
        """
        self._awaited.add(key)
        if self._rank != 0 and self._channel is not None:
            self._channel.send(0, {"which": key})
        else:
            self._ask(0, key)
        try:
            self._owner.check_left()  # without the condition: it looks at the decisions
            with self._changed:
                while key not in self._answers:
                    self._owner.check()
                    self._changed.wait()
                return self._answers.pop(key)
        finally:
            self._awaited.discard(key)

    def misses(self, rank: int) -> bool:
        """Return whether a thread here waits for ``rank``."""
        return bool(self._awaited) and (self._rank == 0 or rank == 0)

    def received(self, peer: int, message: Message) -> bool:
        """Take in what a rank reduced, a question, or an answer; return whether it was one."""
        match message:
            case {"reduced": rows}:
                differing = self._books.take(peer, rows)
                if differing is not None:
                    self._differ(differing)
                for row in rows if self._asking else ():
                    self._answer((row[0], row[1]))
            case {"which": [model, number]}:
                self._ask(peer, (model, number))
            case {"made": [model, number], "of": steps}:
                self._put((model, number), steps)
            case _:
                return False
        return True

    def _ask(self, rank: int, key: Key) -> None:
        """On rank 0: answer now, or when others tell, which from now on do so at once."""
        with self._changed:
            self._asking[key].add(rank)
        if self._channel is not None and not self._has_asked:
            self._has_asked = True
            self._channel.send_all({"hold": False})
        self._answer(key)

    def _answer(self, key: Key) -> None:
        num_told, steps = self._books.steps(key)
        with self._changed:
            is_all = num_told + len(self._asking.get(key, ())) == self._world_size
            asking = self._asking.pop(key, set()) if is_all or len(steps) == 1 else set()
        for rank in asking:
            if rank == 0:
                self._put(key, steps)
            elif self._channel is not None:
                self._channel.send(rank, {"made": key, "of": steps})

    def _put(self, key: Key, steps: list[int]) -> None:
        with self._changed:
            self._answers[key] = steps
            self._changed.notify_all()
