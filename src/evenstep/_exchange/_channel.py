"""A star of TCP connections around rank 0: small messages, heartbeats, and who fell silent.

Why not the process group: gloo names only a port when a peer dies and nothing at all when one is
stopped, its receives cannot be given up without breaking the group, and a group's life ends with
`destroy_process_group`. A socket per peer says at once which peer closed it.
"""

from __future__ import annotations

import math
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, Protocol

from ._internal import say
from ._threads import has_ended, process_name
from ._wire import CLOSED, Data, Peer, Text, text_of

_FLUSH_S = 0.002  # between two looks whether a connection takes more
_JOIN_S = 10.0  # at the close, for a policy that does not come to an end
_SILENT = "stopped, hung or cut off (if it was only slow, raise `Runtime(deadline_s=...)`)"


class Receiver(Protocol):
    """What a channel reports to its owner, from the channel's thread."""

    def received(self, peer: int, message: Data) -> None:
        """Take a message from ``peer``."""

    def lost(self, peer: int, problem: str) -> None:
        """Take notice that ``peer`` is gone or fell silent; called once for each."""

    def tick(self) -> None:
        """Do what is due now and then; called about every heartbeat."""


class StarChannel:
    """Sends and receives messages between rank 0 and all other ranks.

    One daemon thread reads the connections and sends a heartbeat on each every ``heartbeat_s``.
    A peer that has sent nothing for ``deadline_s`` counts as lost: so a stopped process is
    noticed as well as a dead one. A pause of this process itself is no silence of the others.

    A peer whose connection breaks is lost at once. TCP itself gets over a link that is down for
    some seconds.

    Args:
        peers: the connection with each, by its rank. They belong to the channel from now on.
        heartbeat_s: seconds between two heartbeats, positive.
        deadline_s: seconds of silence after which a peer counts as lost, more than
            ``heartbeat_s``.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        peers: dict[int, Peer],
        *,
        heartbeat_s: float,
        deadline_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._peers = peers
        self._here = process_name()
        self._heartbeat_s = heartbeat_s
        self._deadline_s = deadline_s
        self._clock = clock
        self._newest_s = dict.fromkeys(peers, clock())
        self._gone: set[int] = set()
        self._behind: set[int] = set()  # peers whose connection has not taken all
        self._soon: deque[Callable[[], None]] = deque()
        self._calls: deque[tuple[float, Callable[[], None]]] = deque()  # with when they are due
        self._closing = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()

    def start(self, receiver: Receiver) -> None:
        """Start the thread, which notifies ``receiver`` of all that happens."""
        self._thread = threading.Thread(
            target=self._run, args=(receiver,), name="evenstep-channel", daemon=True
        )
        self._thread.start()

    def send(self, peer: int, message: bytes) -> None:
        """Send ``message``; to a peer that is gone, nothing: its loss was reported already."""
        self._send((peer,), text_of(message))

    def send_all(self, message: bytes, *, to: Iterable[int] | None = None) -> None:
        """Send ``message`` to every peer, or to some of them."""
        self._send(self._peers if to is None else to, text_of(message))

    def _send(self, numbers: Iterable[int], text: Text) -> None:
        gone, peers = self._gone, self._peers
        behind = [one for one in numbers if one not in gone and peers[one].send(text)]
        if behind:
            self._behind.update(behind)
            self._wake_up()  # the thread sends the rest

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have the channel's thread make calls, in order, before those that may come later.

        For other threads: once in a step that is due.
        """
        self._soon.append(call)
        self._wake.send(b"x")

    def call_later(self, call: Callable[[], None], *, delay_s: float) -> None:
        """Have the channel's thread make calls, in order, each in ``delay_s`` or at the close."""
        self._calls.append((self._clock() + delay_s, call))
        self._wake_up()

    def _wake_up(self) -> None:
        if threading.current_thread() is not self._thread:
            self._wake.send(b"x")

    def close(self) -> None:
        """Stop the thread and close the connections. May be called again."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._wake.send(b"x")
            self._thread.join(_JOIN_S)
            if not self._thread.is_alive():
                self._make_calls(math.inf)
            self._thread = None
            for number in self._peers.keys() - self._gone:
                self._peers[number].send_rest()
        rest: tuple[Any, ...] = (self._wake, self._woken, self._selector)
        for one in (*self._peers.values(), *rest):
            one.close()

    def _run(self, receiver: Receiver) -> None:
        try:
            self._serve(receiver)
        except Exception as error:
            if self._closing.is_set():
                return  # closed under a thread that had not come to its end
            say("The exchange between the ranks broke down.", error=error)
            self._give_up(f"the thread that talks to it failed ({error!r})", receiver)

    def _give_up(self, problem: str, receiver: Receiver) -> None:
        """Lose all peers, and act on that until the close."""
        for peer in self._peers.values():
            peer.hang_up()  # first: the others are to take this rank for the one that was lost
        for number in self._peers:
            self._lose(number, problem, receiver)
        while not self._closing.wait(self._heartbeat_s):
            self._make_calls(self._clock())
            self._guard(receiver.tick)

    def _serve(self, receiver: Receiver) -> None:
        selector = self._selector
        for number, peer in self._peers.items():
            selector.register(peer.connection, selectors.EVENT_READ, number)
        selector.register(self._woken, selectors.EVENT_READ, None)
        beat_s = self._clock()
        self._newest_s = dict.fromkeys(self._newest_s, beat_s)
        while not self._closing.is_set():
            for key, _ in selector.select(timeout=self._wait_s(beat_s)):
                if key.data is None:
                    self._woken.recv(1 << 12)
                else:
                    self._read(key.data, receiver)
            now_s = self._clock()
            self._make_calls(now_s)
            if now_s >= beat_s:
                self._beat(now_s, receiver, late_s=now_s - beat_s)
                beat_s = now_s + self._heartbeat_s

    def _wait_s(self, beat_s: float) -> float:
        """Return how long there is nothing to do, having sent what could be."""
        if self._soon:
            return 0.0
        due_s = min(beat_s, self._calls[0][0]) if self._calls else beat_s
        most_s = _FLUSH_S if self._flush() else math.inf
        return min(max(0.0, due_s - self._clock()), most_s)

    def _flush(self) -> bool:
        """Send what connections take by now; return whether any of them leaves something."""
        for number in tuple(self._behind - self._gone):
            self._behind.discard(number)  # before: another thread may add it meanwhile
            if self._peers[number].flush():
                self._behind.add(number)
        return bool(self._behind - self._gone)

    def _beat(self, now_s: float, receiver: Receiver, *, late_s: float) -> None:
        for number, peer in self._peers.items():
            if number not in self._gone and peer.beat():
                self._behind.add(number)
        if late_s > self._heartbeat_s:  # this process was stopped, and the others are not late
            self._newest_s = dict.fromkeys(self._newest_s, now_s)
        self._check_silence(now_s, receiver)
        self._guard(receiver.tick)

    def _make_calls(self, now_s: float) -> None:
        while self._soon:
            self._guard(self._soon.popleft())
        while self._calls and self._calls[0][0] <= now_s:
            _, call = self._calls.popleft()
            self._guard(call)

    def _read(self, number: int, receiver: Receiver) -> None:
        """Take in what a peer sent, or that its connection is at an end."""
        peer = self._peers[number]
        if (messages := peer.receive()) is not None:
            self._newest_s[number] = self._clock()
        for message in messages or ():
            self._guard(receiver.received, number, message)
        if peer.end:
            self._selector.unregister(peer.connection)
            peer.hang_up()
            self._lose(number, peer.end, receiver)

    def _check_silence(self, now_s: float, receiver: Receiver) -> None:
        for number, peer in self._peers.items():
            silent_s = now_s - self._newest_s[number]
            if number in self._gone:
                continue
            if silent_s > self._deadline_s:
                self._lose(number, f"it has been silent for {silent_s:.1f} s: {_SILENT}", receiver)
            elif silent_s > 2 * self._heartbeat_s and has_ended(peer.process, self._here):
                # Its forked loader workers may keep the connection open for some seconds.
                self._lose(number, CLOSED, receiver)

    def _lose(self, number: int, problem: str, receiver: Receiver) -> None:
        if number not in self._gone:
            self._gone.add(number)
            self._guard(receiver.lost, number, problem)

    def _guard(self, call: Callable[..., None], *arguments: Any) -> None:
        """Keep the thread alive whatever the receiver does."""
        try:
            call(*arguments)
        except Exception as error:
            say("The exchange failed on a message.", error=error)
