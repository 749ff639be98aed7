"""One process holds the state of a step, and tells every rank what to compute next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from threading import Condition, Thread
from typing import Any, final

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from evenstep.claims import AbstractScheme, Chunk

Ask = Callable[[float | None], Chunk | None]
"""From the asker's samples per second, None while unknown, to its next chunk, None at the end."""


@final
class Foreman:
    """The state of the step under way, for threads that ask on behalf of ranks.

    A step ends when all ranks have asked in vain. Then the next one begins.

    Args:
        scheme: what it asks in turn.
        batch_size: the plan of every step, ``(world_size,)``.
    """

    def __init__(self, scheme: AbstractScheme[Any], batch_size: NDArray[np.int64]) -> None:
        self._scheme, self._batch_size = scheme, batch_size
        self._state = scheme.begin(batch_size)
        self._speeds = np.ones(len(batch_size))
        self._changed, self._idle, self._step = Condition(), set[int](), 0

    def ask(self, rank: int, speed: float | None) -> Chunk | None:
        """Return the next chunk of ``rank``; wait for one while others may still hand some over."""
        with self._changed:
            step = self._step
            self._speeds[rank] = speed or self._speeds[rank]
            while self._step == step:
                turn = self._scheme.turn(self._state, rank, self._speeds)
                self._state = turn.state
                self._idle -= set(turn.woken)
                self._changed.notify_all()
                if turn.chunk is not None:
                    return turn.chunk
                self._rest(rank, step)
        return None

    def _rest(self, rank: int, step: int) -> None:
        """Wait until ``rank`` was given something, or the step is over."""
        self._idle.add(rank)
        if len(self._idle) == len(self._batch_size):
            self._state = self._scheme.begin(self._batch_size)
            self._idle, self._step = set(), step + 1
            self._changed.notify_all()
        self._changed.wait_for(lambda: self._step != step or rank not in self._idle)


@contextmanager
def foreman(scheme: AbstractScheme[Any], batch_size: NDArray[np.int64], rank: int) -> Iterator[Ask]:
    """Yield this rank's way to ask; rank 0 has the foreman, the others a connection to it."""
    address: list[Any] = [None]
    if rank:
        dist.broadcast_object_list(address)
        with Client(address[0]) as link:
            yield partial(_asked_over, link)
        return
    shared = Foreman(scheme, batch_size)
    with Listener() as listener:
        dist.broadcast_object_list([listener.address])
        links = [listener.accept() for _ in batch_size[1:]]
    threads = [Thread(target=_answer, args=(shared, link)) for link in links]
    for thread in threads:
        thread.start()
    yield partial(shared.ask, rank)
    for thread in threads:
        thread.join()


def _asked_over(link: Connection, speed: float | None) -> Chunk | None:
    link.send((dist.get_rank(), speed))
    answer: Chunk | None = link.recv()
    return answer


def _answer(shared: Foreman, link: Connection) -> None:
    """Answer one rank until it hangs up."""
    try:
        while True:
            link.send(shared.ask(*link.recv()))
    except (EOFError, ConnectionError):
        link.close()
