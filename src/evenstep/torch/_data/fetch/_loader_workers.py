"""Torch's own loader workers, given tasks: what runs inside them, and the pool of one rank."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Thread, current_thread
from time import perf_counter
from typing import Any, Generic, TypeVar, final

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ._chunks import Packed, pack
from ._torch_loader import Wanted, fetch, inner_loader

Asked = TypeVar("Asked")
"""What a task is for."""

_PARENT_CHECK_S = 5.0  # as often as torch's own workers look whether their parent is there
# Enough that a worker never waits for the next task, few enough that a task which a new plan
# makes urgent has at most this many in front of it.
_TASKS_PER_WORKER = 2
_STOP_WITHIN_S = 2.0
# Torch looks every 5 s whether a worker that sends nothing is still there.
_NOTICE_WITHIN_S = 6.0


@dataclass(frozen=True, slots=True)
class FetchedChunk:
    """Samples, the worker that fetched them, and the seconds that they took."""

    worker: int
    content: Packed
    fetch_s: float


class FetchService(IterableDataset[FetchedChunk]):
    """The user's data set as a service: an endless stream of the chunks it is asked for.

    Torch's loader runs one copy in each of its workers, which so start, are seeded, set up by
    ``worker_init_fn`` and stopped as in any loader. That loader prefetches by counting, and what
    it asks of an ``IterableDataset`` is merely the next item: which one, tasks say that arrive
    through a pipe for each worker, as late as can be.
    """

    def __init__(
        self,
        dataset: Any,
        inboxes: Sequence[Connection],
        merge: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.dataset = dataset
        self._inboxes = inboxes
        self._merge = merge

    def __iter__(self) -> Iterator[FetchedChunk]:
        info = get_worker_info()
        assert info is not None  # it runs in loader workers alone
        tasks: deque[Wanted] = deque()
        parent = os.getppid()
        while self._receive(self._inboxes[info.id], tasks, parent):
            yield self._fetched(tasks.popleft(), info.id)

    def _receive(self, inbox: Connection, tasks: deque[Wanted], parent: int) -> bool:
        """Move all messages into ``tasks``, at least one; return whether to continue."""
        while not tasks or inbox.poll():
            if not inbox.poll(_PARENT_CHECK_S):
                # Forked siblings keep the pipe open when the training process is killed.
                if os.getppid() != parent:
                    return False
                continue
            try:
                task = inbox.recv()
            except EOFError:
                return False
            if task is None:
                return False
            tasks.append(task)
        return True

    def _fetched(self, wanted: Wanted, worker: int) -> FetchedChunk:
        began_s = perf_counter()
        try:
            samples = fetch(self.dataset, wanted)
            fetch_s = perf_counter() - began_s
            content = pack(self._merge(samples) if self._merge else samples)
        except Exception as error:  # torch sends it
            _check_sendable(error, worker)
            raise
        return FetchedChunk(worker, content, fetch_s)


def _check_sendable(error: Exception, worker: int) -> None:
    """Raise what can be sent, as text, if the class of ``error`` exists in the worker alone."""
    try:
        pickle.dumps(type(error))
    except Exception:
        text = "".join(traceback.format_exception(error))
        where = f"Caught {type(error).__name__} in DataLoader worker process {worker}."
        raise RuntimeError(f"{where}\nOriginal {text}") from None


def _with_exit_codes(problem: Exception, processes: Sequence[Any]) -> Exception:
    """Return ``problem``, which says how workers ended if it is that they did: torch does not."""
    codes = {process.pid: process.exitcode for process in processes if not process.is_alive()}
    if type(problem) is not RuntimeError or not codes or "exited unexpectedly" not in str(problem):
        return problem
    return RuntimeError(
        f"{problem}. Exit codes by pid: {codes}. A negative one is the signal that ended the "
        "worker; -9 is often the kernel's, for want of memory."
    )


@final
class WorkerPool(Generic[Asked]):
    """The loader workers of one rank: takes tasks, and brings in what workers fetched.

    Each worker does its tasks in the order in which they were given to it. One thread receives, so
    that chunks arrive while the training thread computes. ``open`` and ``close`` belong to the
    training thread: torch watches its workers through a signal handler which only the main thread
    can set.

    Args:
        loader: the user's, with at least one worker.
        merge: applied to the samples of a chunk in the worker; None is to leave them.
        deliver: called by the receiving thread with what was asked for, and its chunk.
        fail: called by the receiving thread, once, with why there will be no more.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        merge: Callable[[list[Any]], Any] | None,
        deliver: Callable[[Asked, FetchedChunk], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._loader = loader
        self._merge = merge
        self._deliver = deliver
        self._fail = fail
        self._closing = False
        self._asked: list[deque[Asked]] = [deque() for _ in range(loader.num_workers)]
        self._outboxes: list[Connection] = []
        self._processes: tuple[Any, ...] = ()
        self._thread: Thread | None = None

    def open(self, generator: torch.Generator) -> None:
        """Start the workers, seeded by what ``generator`` draws, and the thread; once."""
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(self._loader.num_workers)]
        self._outboxes = [theirs for _, theirs in pipes]
        inboxes = [mine for mine, _ in pipes]
        chunks = iter(
            inner_loader(
                self._loader,
                FetchService(self._loader.dataset, inboxes, self._merge),
                generator=generator,
                prefetch_factor=_TASKS_PER_WORKER,
                in_order=False,
            )
        )
        # Torch has no public name for its workers. Of all children of this process, other threads
        # may have started some meanwhile, which are not ours to end.
        self._processes = tuple(chunks._workers)  # type: ignore[attr-defined]
        for inbox in inboxes:
            inbox.close()
        self._thread = Thread(
            target=self._receive, args=(chunks,), name="evenstep-receive", daemon=True
        )
        # Workers end with the last reference, so it is the thread's alone.
        del chunks
        self._thread.start()

    def has_room(self) -> bool:
        """Return whether a worker would take another task."""
        return min(map(len, self._asked)) < _TASKS_PER_WORKER

    def send(self, wanted: Wanted, asked: Asked) -> None:
        """Have the least busy worker fetch samples; ``asked`` is delivered with them."""
        worker = min(range(len(self._asked)), key=lambda worker: len(self._asked[worker]))
        self._asked[worker].append(asked)
        with suppress(OSError):  # it died, as the receiving thread is about to find
            self._outboxes[worker].send(wanted)

    def close(self) -> None:
        """End workers and thread. What is being fetched may finish; after 2 s it is killed."""
        self._closing = True
        self._dismiss()
        thread = self._thread
        if thread is not None and thread is not current_thread():
            # The thread itself comes here when it collects a forgotten loader.
            thread.join(_STOP_WITHIN_S)
            if thread.is_alive():
                for process in self._processes:
                    process.terminate()  # torch's workers take it from their parent as a clean end
                thread.join(_NOTICE_WITHIN_S)
        for outbox in self._outboxes:
            outbox.close()

    def _receive(self, chunks: Iterator[FetchedChunk]) -> None:
        problem: Exception = RuntimeError("the loader workers ended unasked")
        try:
            for chunk in chunks:
                self._deliver(self._asked[chunk.worker].popleft(), chunk)
        except Exception as error:
            problem = _with_exit_codes(error, self._processes)
            # Tracebacks would keep the iterator, and so the workers, alive.
            problem.__traceback__ = problem.__cause__ = problem.__context__ = None
        self._dismiss()
        if not self._closing:
            self._fail(problem)

    def _dismiss(self) -> None:
        for outbox in self._outboxes:
            with suppress(OSError):  # that worker is gone, or it was dismissed before
                outbox.send(None)
