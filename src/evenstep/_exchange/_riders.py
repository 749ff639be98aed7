"""What travels along with reports to rank 0 and has plans of its own come back."""

from __future__ import annotations

from typing import Protocol, final

from ._channel import StarChannel
from ._wire import Message, Part


class Rider(Part, Protocol):
    """A part whose messages go along with reports, and whose plans hold with the answers."""

    def along(self) -> Message:
        """Return what goes along with this rank's next report; ``received`` takes it on rank 0."""

    def answers(self, index: int) -> None:
        """On rank 0: hear that step ``index`` is about to be answered."""

    def close(self) -> None:
        """End what was begun. May be called again."""


@final
class Riders:
    """All riders of a rank, which are the same kinds on all ranks; none in most runs.

    Args:
        channel: connections to the others; None with one process.
    """

    def __init__(self, channel: StarChannel | None) -> None:
        self._channel = channel
        self._riders: tuple[Rider, ...] = ()

    def add(self, rider: Rider) -> None:
        """Have ``rider`` take part, before the first step."""
        self._riders += (rider,)

    def tell_all(self, message: Message) -> None:
        """On rank 0: send a rider's ``message`` to all others, ahead of the next answer."""
        if self._channel is not None:
            self._channel.send_all(message)

    def along(self) -> Message:
        """Return what goes along with this rank's next report."""
        message: Message = {}
        for rider in self._riders:
            message |= rider.along()
        return message

    def received(self, peer: int, message: Message) -> bool:
        """Have each take in its own of a message; return whether any was there."""
        return any([rider.received(peer, message) for rider in self._riders])

    def answers(self, index: int) -> None:
        """On rank 0: hear that step ``index`` is about to be answered."""
        for rider in self._riders:
            rider.answers(index)

    def close(self) -> None:
        """End what all of them began."""
        for rider in self._riders:
            rider.close()
