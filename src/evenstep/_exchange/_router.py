"""Messages from the parts of this rank to those of the others, and the wait for what comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

from ._channel import Data, StarChannel
from ._internal import fault_in_words, log_fault
from ._message_kinds import Message, MessageError, RankLost, read, written

if TYPE_CHECKING:
    from ._lost_ranks import LostRanks


class Part(Protocol):
    """What takes in messages of its own kinds.

    Attributes:
        kinds: of messages; no other part has any of them.
    """

    @property
    def kinds(self) -> tuple[type[Message], ...]: ...

    def received(self, peer: int, message: Message) -> None:
        """Take in a message of one of the kinds, from this rank's own parts or another's."""


class Extension(Part, Protocol):
    """A part whose messages go along with reports, and whose plans hold with the answers."""

    def along(self) -> Iterable[Message]:
        """Return what goes along with this rank's next report."""

    def answers(self, index: int) -> None:
        """On rank 0: note that step ``index`` is about to be answered."""

    def close(self) -> None:
        """End what was begun. May be called again."""


@final
class Router:
    """Carries messages between the parts of this rank and of the others, over rank 0.

    Rank 0's own messages to itself are taken in at once, on the thread that sends them: a part is
    written as if rank 0 were elsewhere, and works with one process as well.

    Args:
        rank: this process.
        world_size: number of workers.
        channel: connections to the others; None with one process.

    Attributes:
        owner: knows which workers are lost; set before the first message.
        changed: guards what parts wait for. A part that brings it about notifies all.
        sent, awaited: how many messages of each name this rank has sent, and which one it waits
            for: the progress reporter sends these to rank 0.
    """

    owner: LostRanks

    def __init__(self, rank: int, world_size: int, channel: StarChannel | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.changed = threading.Condition()
        self.sent: dict[str, int] = {}
        self.awaited: dict[str, int] = {}
        self._channel = channel
        self._is_closed = False
        self._parts: dict[type[Message], Part] = {}
        self._here: dict[tuple[Any, ...], Any] = {}  # what was sent, until it is taken
        self._missing: dict[tuple[Any, ...], Callable[[int], bool]] = {}

    def add(self, *parts: Part) -> None:
        """Have parts take in the messages of their kinds."""
        for part in parts:
            self._parts |= dict.fromkeys(part.kinds, part)

    def to_leader(self, *messages: Message) -> None:
        """Send messages to rank 0, in one piece."""
        if self.rank == 0:
            self.take(0, messages)
        elif self._channel is not None:
            self._channel.send(0, written(messages))

    def to(self, rank: int, *messages: Message) -> None:
        """Send messages to a rank, which is rank 0 or this one is, in one piece."""
        if rank == self.rank:
            self.take(rank, messages)
        elif self._channel is not None:
            self._channel.send(rank, written(messages))

    def to_workers(self, *messages: Message) -> None:
        """On rank 0: send messages to all other workers, in one piece."""
        if self._channel is not None:
            self._channel.send_all(written(messages), to=range(1, self.world_size))

    def to_everyone(self, *messages: Message) -> None:
        """Send messages to all that this rank is connected with, servers included, in one piece."""
        if self._channel is not None:
            self._channel.send_all(written(messages))

    def received(self, peer: int, data: Data) -> None:
        """Take in what came from another rank, which is lost if it cannot be understood."""
        try:
            self.take(peer, read(data))
        except MessageError as error:
            self.owner.lose(peer, f"it sent what rank {self.rank} cannot read: {error}")
        except Exception as error:
            self._fail(error)

    def take(self, peer: int, messages: Iterable[Message]) -> None:
        """Have the parts take messages in."""
        for message in messages:
            part = self._parts.get(type(message))
            if part is None:
                name = type(message).__name__
                self.owner.lose(peer, f"it sent `{name}`, which rank {self.rank} has no use for")
            else:
                part.received(peer, message)
        self.owner.check_left()

    def wait(self, is_here: Callable[[], bool], *, limit_s: float | None = None) -> bool:
        """Wait until something is here, or will not come any more; return whether it is.

        Args:
            is_here: looks for it.
            limit_s: for how long; None is as long as it takes.
        """
        # Not under the condition: it looks at the decisions, whose lock is held to publish.
        self.owner.check_left()
        with self.changed:
            self.changed.wait_for(
                lambda: is_here() or self.owner.is_broken or self._is_closed, timeout=limit_s
            )
            return is_here()

    def need(self, is_here: Callable[[], bool]) -> None:
        """Wait until something is here.

        Raises:
            WorkerLostError: a worker was lost before that.
            RanksDivergedError, ValueError: gradients were wrong, on all ranks.
            RuntimeError: the run was closed here before that, by another thread.
        """
        if not self.wait(is_here):
            self.owner.check()
            raise RuntimeError("The balancer was closed, and with it this loader.")

    def put(self, key: tuple[Any, ...], value: Any) -> None:
        """Have what was sent to this rank found by the thread that takes it, now or later."""
        with self.changed:
            self._here[key] = value
            self.changed.notify_all()

    def get(self, key: tuple[Any, ...], *, lacks: Callable[[int], bool] = lambda rank: True) -> Any:
        """Return what was sent under a key, once it is here; only once.

        Args:
            key: its first part says what it is.
            lacks: on rank 0, returns whether something of a rank is missing for it.

        Raises:
            WorkerLostError, RanksDivergedError, ValueError, RuntimeError: as ``need``.
        """
        with self.changed:
            if key not in self._here:
                self._missing[key] = lacks
        try:
            self.need(lambda: key in self._here)
        finally:
            self._missing.pop(key, None)
        with self.changed:
            return self._here.pop(key)

    def drop(self, is_old: Callable[[tuple[Any, ...]], bool]) -> None:
        """Forget what was sent under some keys, and never taken."""
        with self.changed:
            for old in filter(is_old, tuple(self._here)):
                del self._here[old]

    def misses(self, rank: int) -> bool:
        """Return whether a thread waits in ``get`` for what only ``rank`` could send."""
        if self.rank != 0:
            return rank == 0 and bool(self._missing)
        return any(lacks(rank) for lacks in tuple(self._missing.values()))

    def notify(self) -> None:
        """Have those who wait look again."""
        with self.changed:
            self.changed.notify_all()

    def later(self, call: Callable[[], None], *, delay_s: float) -> None:
        """Make a call on the channel's thread, or at once with one process."""
        if self._channel is None:
            call()
        else:
            self._channel.call_later(partial(self._guarded, call), delay_s=delay_s)

    def waker(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return what has the channel's thread make a call, before all that can wait.

        Where that fails, this rank counts as lost: others wait for what it was to send. With one
        process, the thread that wakes it makes the call.
        """
        if self._channel is None:
            return call
        return partial(self._channel.call_soon, partial(self._guarded, call))

    def close(self) -> None:
        """Send nothing any more, and have no thread wait for what could come."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Have this rank count as lost: what others rely on failed, which is a fault of ours."""
        log_fault(None, error, "This rank cannot go on.")
        self.to_leader(RankLost(self.rank, fault_in_words(error)))
        self.owner.lose(self.rank, fault_in_words(error))
