"""Who has connected to rank 0 and has not said yet who it is: a few at a time, each for seconds."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress

from ._greeting import Newcomer

_MOST = 64  # at a time; a rank says who it is at once, so the oldest is the likeliest stranger
_GREETING_S = 5.0


class Door:
    """Lets connections in that greet with the run's token, and keeps strangers few.

    A stranger that says nothing, or a byte now and then, holds up nobody: each has five seconds,
    and past 64 of them the oldest is turned away for the next.

    Args:
        token: what a greeting has to know.
        selector: tells when a newcomer can be read, which is then the key's ``data``.
    """

    def __init__(self, token: str, selector: selectors.BaseSelector) -> None:
        self._token = token
        self._selector = selector
        self._since_s: dict[Newcomer, float] = {}  # the oldest first

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._since_s)

    def accept(self, server: socket.socket, now_s: float) -> None:
        """Let those wait at the door who have connected."""
        for _ in range(_MOST):
            try:
                connection, _ = server.accept()
            except OSError:
                return  # nobody else, or gone again
            newcomer = Newcomer(connection, self._token)
            self._since_s[newcomer] = now_s
            self._selector.register(connection, selectors.EVENT_READ, newcomer)
            if len(self._since_s) > _MOST:
                self.turn_away(next(iter(self._since_s)))

    def let_in(self, newcomer: Newcomer) -> None:
        """Take somebody from the door who has greeted."""
        del self._since_s[newcomer]
        self._forget(newcomer)

    def turn_away(self, newcomer: Newcomer) -> None:
        """Close somebody's connection."""
        if self._since_s.pop(newcomer, None) is not None:
            self._forget(newcomer)
        newcomer.connection.close()

    def clear(self, now_s: float) -> None:
        """Turn away whoever has had the time to greet."""
        for newcomer, since_s in tuple(self._since_s.items()):
            if now_s - since_s > _GREETING_S:
                self.turn_away(newcomer)

    def close(self) -> None:
        """Turn everybody away."""
        for newcomer in tuple(self._since_s):
            self.turn_away(newcomer)

    def _forget(self, newcomer: Newcomer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(newcomer.connection)
