"""Who tells whom that a rank is lost, so that all name the one that is."""

from __future__ import annotations

from contextlib import suppress
from typing import final

import torch

from ._transport import AbstractTransport, Pending

_TAG = 1
_NOBODY = -1
_TELL_S = 1.0  # a peer that is stopped takes nothing in


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
        self._said = {peer: torch.full((1,), _NOBODY) for peer in peers}
        self._pending = {
            peer: transport.receive(said, peer, _TAG) for peer, said in self._said.items()
        }
        self._sent: list[tuple[Pending, torch.Tensor]] = []

    def heard(self) -> tuple[int, int] | None:
        """Return who found whom lost before, None if no rank said anything."""
        for peer, said in self._said.items():
            if (lost := int(said)) != _NOBODY:
                return peer, lost
        return None

    def tell(self, lost: int) -> None:
        """Tell all others that ``lost`` is: those who can still be reached, within moments."""
        notice = torch.tensor([lost])
        for peer in self._said:
            if peer != lost:
                with suppress(RuntimeError):
                    self._sent.append((self._transport.send(notice, peer, _TAG), notice))
        for pending, _ in self._sent:
            with suppress(RuntimeError):
                pending.wait(_TELL_S)
