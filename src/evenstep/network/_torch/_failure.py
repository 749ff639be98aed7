"""The first failure of an exchange: which rank is lost, reported to all, and raised everywhere."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import final

import torch

from ...exceptions import WorkerLostError
from ._orders import PlanMismatchError
from ._transport import AbstractTransport, PeerFailed, Pending

_TAG = 1
_NONE = -1
_SEND_S = 1.0  # a peer that is stopped takes nothing in


@final
class Failure:
    """Turns the first failure into the error of all that follows, and ends the waits of all ranks.

    Args:
        transport: carries gradients; it is broken off.
        option: which argument says how long a rank may be slow, for the error.
    """

    def __init__(self, transport: AbstractTransport, *, option: str) -> None:
        self._transport = transport
        self._rank = transport.rank
        self._ranks = transport.ranks
        self._option = option
        self._notices: Notices | None = None
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Listen to what others find out."""
        self._notices = Notices(self._transport)

    def on(self, error: BaseException) -> BaseException:
        """Return the error to raise, from any thread; the first time, notify all and break off."""
        with self._lock:
            if self.error is None:
                lost, self.error = self._judge(error)
                if self._notices is not None:
                    self._notices.send(lost)
                self._transport.break_off()
        return self.error

    def check(self) -> None:
        """Raise what ended the exchange, if anything did.

        Raises:
            WorkerLostError: a rank was lost.
            BaseException: something else happened.
        """
        if self.error is not None:
            raise self.error

    def _judge(self, error: BaseException) -> tuple[int, BaseException]:
        """Return who is lost, or out of step, and the error to raise for it."""
        if isinstance(error, PlanMismatchError):
            return error.peer, error
        if isinstance(error, WorkerLostError) and error.rank in self._ranks:
            return self._ranks.index(error.rank), error
        if not isinstance(error, PeerFailed):
            return self._rank, error
        notice = None if self._notices is None else self._notices.first()
        reporter, lost = notice or (self._rank, error.peer)
        if notice is None:
            problem = str(error)
        elif lost == reporter:
            problem = "it stopped after an error of its own, or ended early"
        elif lost == self._rank:
            problem = f"rank {self._ranks[reporter]} timed out waiting for this rank"
        else:
            problem = f"rank {self._ranks[reporter]} reported it"
        return lost, self._loss(self._ranks[lost], problem)

    def _loss(self, rank: int, problem: str) -> WorkerLostError:
        return WorkerLostError(
            rank,
            f"Rank {rank} was lost in the exchange of gradients: {problem}. Restart the run from "
            f"its last checkpoint; if the rank was only slow, raise `{self._option}`.",
        )


@final
class Notices:
    """A receive from every other rank, posted at the start and read when something failed.

    A rank that finds another one lost says so to the rest before it breaks off. They see its
    connection close, and would name it, but for the notice that came before.

    Args:
        transport: between them; one that matches by tag.
    """

    def __init__(self, transport: AbstractTransport) -> None:
        self._transport = transport
        peers = [rank for rank in range(transport.world_size) if rank != transport.rank]
        self._received = {peer: torch.full((1,), _NONE) for peer in peers}
        self._pending = {
            peer: transport.receive(buffer, peer, _TAG) for peer, buffer in self._received.items()
        }
        self._sent: list[tuple[Pending, torch.Tensor]] = []

    def first(self) -> tuple[int, int] | None:
        """Return who found whom lost before, None if no rank said anything."""
        for peer, buffer in self._received.items():
            if (lost := int(buffer)) != _NONE:
                return peer, lost
        return None

    def send(self, lost: int) -> None:
        """Send ``lost`` to all others who can still be reached, within moments."""
        notice = torch.tensor([lost])
        for peer in self._received:
            if peer != lost:
                with suppress(RuntimeError):
                    self._sent.append((self._transport.send(notice, peer, _TAG), notice))
        for pending, _ in self._sent:
            with suppress(RuntimeError):
                pending.wait(_SEND_S)
