"""Connections to rank 0 whose other ends are not known yet: few at a time, each for seconds."""

from __future__ import annotations

import logging
import selectors
import socket
from contextlib import suppress

from ._greeting import Greeting, Newcomer
from ._wire import Wire

_STRANGERS = 64  # beside as many newcomers as there are ranks
_GREETING_S = 5.0


class Door:
    """Lets connections in that greet with the run's token, and keeps strangers few.

    Every newcomer has five seconds to greet, and all are read at the same time, so a stranger
    that sends nothing, or a byte now and then, delays no rank. Where strangers are more than 64,
    the oldest newcomer is turned away for the next one. One whose answer waits to be read is kept:
    in a flood, that is how a rank comes through.

    Args:
        token: what a greeting has to know.
        selector: tells when a newcomer can be read; the newcomer is the key's ``data``.
        num_ranks: how many may come at the same time.

    Attributes:
        problem: why a connection could not be accepted, as where too many files are open.
    """

    def __init__(self, token: str, selector: selectors.BaseSelector, *, num_ranks: int) -> None:
        self._token = token
        self._selector = selector
        self._most = _STRANGERS + num_ranks
        self._since_s: dict[Newcomer, float] = {}  # the oldest first
        self._paused: selectors.SelectorKey | None = None
        self.problem: OSError | None = None

    def accept(self, server: socket.socket, now_s: float) -> None:
        """Accept the connections that wait, and send each its challenge."""
        for number in range(self._most):
            try:
                connection, _ = server.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if number == 0:  # later ones may be due to what was just accepted
                    self._cannot_accept(server, error)
                return
            try:
                newcomer = Newcomer(connection, self._token)
            except OSError:
                connection.close()
                continue
            self._since_s[newcomer] = now_s
            self._selector.register(connection, selectors.EVENT_READ, newcomer)
            if len(self._since_s) > self._most:
                self._make_room("there are too many")

    def read(self, newcomer: Newcomer) -> Greeting | None:
        """Return what a newcomer says; None if it has not said all, or was turned away."""
        try:
            return newcomer.read()
        except Exception as error:  # strangers send anything
            self.turn_away(newcomer, str(error))
            return None

    def let_in(self, newcomer: Newcomer) -> tuple[socket.socket, Wire] | None:
        """Welcome a newcomer that has greeted; return its connection, or None if that broke.

        It is no longer read here.
        """
        try:
            connected = newcomer.welcome()
        except OSError as error:
            self.turn_away(newcomer, str(error))
            return None
        del self._since_s[newcomer]
        self._forget(newcomer)
        return connected

    def turn_away(self, newcomer: Newcomer, reason: str) -> None:
        """Close the connection of a newcomer."""
        logging.getLogger("evenstep").debug("A connection to rank 0 was refused: %s.", reason)
        if self._since_s.pop(newcomer, None) is not None:
            self._forget(newcomer)
        newcomer.connection.close()

    def clear(self, now_s: float) -> None:
        """Turn newcomers away that have had their time to greet; accept again after a problem."""
        if self._paused is not None:
            paused, self._paused = self._paused, None
            self._selector.register(paused.fileobj, paused.events, paused.data)
        for newcomer, since_s in tuple(self._since_s.items()):
            if now_s - since_s <= _GREETING_S:
                return
            self.turn_away(newcomer, f"it did not greet within {_GREETING_S:g} s")

    def close(self) -> None:
        """Turn all newcomers away."""
        for newcomer in tuple(self._since_s):
            self.turn_away(newcomer, "all ranks have connected")

    def _make_room(self, reason: str) -> None:
        """Turn the oldest newcomer away of those that have said nothing, if there are any."""
        silent = (one for one in self._since_s if not one.has_answered())
        self.turn_away(next(silent, next(iter(self._since_s))), reason)

    def _cannot_accept(self, server: socket.socket, error: OSError) -> None:
        """Make room where too many files are open; with none to make, look again in a while."""
        if self._since_s:
            self._make_room(str(error))
        else:
            self.problem, self._paused = error, self._selector.unregister(server)

    def _forget(self, newcomer: Newcomer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(newcomer.connection)
