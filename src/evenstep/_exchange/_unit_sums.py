"""The units of each step, summed over ranks: sent at the hand-out, waited for in the backward."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, Protocol

from ._channel import StarChannel


class Owner(Protocol):
    """Who knows which workers are lost."""

    def check(self) -> None:
        """Raise if a worker was lost."""

    def check_left(self) -> None:
        """Take notice if a rank is needed that has ended its run."""


class UnitSum:
    """The units of one step over all ranks.

    Attributes:
        total: the sum; None while it is not known.
    """

    def __init__(self) -> None:
        self.total: float | None = None


class UnitSums:
    """One rank's side of the sums: every rank tells rank 0, which tells all ranks.

    One small message each way a step, sent without waiting. All ranks divide by the same bits,
    since rank 0 alone adds up.

    Args:
        rank: this process.
        world_size: number of processes.
        channel: connections to the others; None with one process.
        changed: notified when a sum becomes known, and when a worker was lost.
        owner: told when units of a rank were sent or came.
        came_to: told of each step whose units this rank has told.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        channel: StarChannel | None,
        changed: threading.Condition,
        *,
        owner: Owner,
        came_to: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._channel = channel
        self._changed = changed
        self._owner = owner
        self._came_to = came_to
        self._lock = threading.Lock()
        self._arrived: dict[int, dict[int, float]] = {}  # on rank 0, by step
        self._awaited: dict[int, UnitSum] = {}

    def add(self, step: int, units: float) -> UnitSum:
        """Send this rank's units of ``step``; return where the sum will be found."""
        self._awaited[step] = awaited = UnitSum()
        if self._rank == 0 or self._channel is None:
            self.take(0, step, units)
        else:
            self._channel.send(0, {"step": step, "units": units})
            self._owner.check_left()
        self._came_to(step)
        return awaited

    def wait(self, unit_sum: UnitSum) -> None:
        """Wait until a sum is known.

        Raises:
            WorkerLostError: a worker was lost whose units are missing.
        """
        with self._changed:
            while unit_sum.total is None:
                self._owner.check()
                self._changed.wait()

    def take(self, rank: int, step: int, units: float) -> None:
        """On rank 0: take in a rank's units, and tell all ranks the sum if they are the last."""
        with self._lock:
            arrived = self._arrived.setdefault(step, {})
            arrived[rank] = units
            complete = len(arrived) == self._world_size
            if complete:
                del self._arrived[step]
        if complete:
            total = math.fsum(arrived.values())
            if self._channel is not None:
                self._channel.send_all({"step": step, "total_units": total})
            self.publish(step, total)
        else:
            self._owner.check_left()

    def publish(self, step: int, total: float) -> None:
        """Take note of a sum."""
        with self._changed:
            awaited = self._awaited.pop(step, None)
            if awaited is not None:
                awaited.total = total
                self._changed.notify_all()

    def step_without(self, rank: int) -> int | None:
        """Return a step whose sum misses ``rank``'s message; None if there is none.

        For a rank that has left: what it sent came before its goodbye, so the rest never will.
        """
        if self._rank != 0:
            return min(tuple(self._awaited), default=None) if rank == 0 else None
        with self._lock:
            return min((k for k, known in self._arrived.items() if rank not in known), default=None)

    def received(self, peer: int, message: dict[str, Any]) -> bool:
        """Take in a message if it is about units; return whether it was."""
        match message:
            case {"step": step, "units": units}:
                self.take(peer, step, units)
            case {"step": step, "total_units": total}:
                self.publish(step, total)
            case _:
                return False
        return True
