"""The loader workers of one rank, seen from the training process."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread, current_thread
from typing import Any

import torch
from torch.utils.data import DataLoader

from ._worker import Chunk, FetchService, Task, WorkerInit

# Enough that a worker never waits for the next task, few enough that a task which a new plan
# makes urgent has at most this many in front of it.
_TASKS_PER_WORKER = 2
_STOP_WITHIN_S = 2.0
# Torch looks every 5 s whether a worker that sends nothing is still there.
_NOTICE_WITHIN_S = 6.0


class Crew:
    """Starts torch's own loader workers, gives them tasks and brings in what they fetched.

    One thread receives, so that chunks arrive while the training thread computes. ``started``
    and ``stop`` belong to the training thread: torch watches its workers through a signal handler
    which only the main thread can set.

    Args:
        loader: the user's, with at least one worker.
        generator: draws what seeds the workers.
        merge: applied to the samples of a chunk in the worker; None is to leave them.
        deliver: called by the receiving thread with every chunk.
        fail: called by the receiving thread, once, with why there will be no more.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        generator: torch.Generator,
        merge: Callable[[list[Any]], Any] | None,
        deliver: Callable[[Chunk], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._deliver = deliver
        self._fail = fail
        self._stopping = False
        self._num_sent = 0
        self._worker_of: dict[int, int] = {}
        self._load = [0] * loader.num_workers

        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(loader.num_workers)]
        self._outboxes: list[Connection] = [theirs for _, theirs in pipes]
        inboxes = [mine for mine, _ in pipes]
        chunks = _chunks(loader, FetchService(loader.dataset, inboxes, merge), generator)
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
        return min(self._load) < _TASKS_PER_WORKER

    def send(self, indices: list[int]) -> int:
        """Give the least busy worker a task and return its number."""
        worker = self._load.index(min(self._load))
        task = Task(self._num_sent, indices)
        with suppress(OSError):  # it died, as the receiving thread is about to find
            self._outboxes[worker].send(task)
        self._num_sent += 1
        self._load[worker] += 1
        self._worker_of[task.number] = worker
        return task.number

    def done(self, number: int) -> None:
        """Take note that a task's chunk has arrived."""
        self._load[self._worker_of.pop(number)] -= 1

    def stop(self) -> None:
        """End workers and thread. What is being fetched may finish; after 2 s it is killed."""
        self._stopping = True
        self._dismiss()
        if current_thread() is not self._thread:  # as when it collects a forgotten loader
            self._thread.join(_STOP_WITHIN_S)
            if self._thread.is_alive():
                for process in self._processes:
                    process.terminate()  # torch's workers take it from their parent as a clean end
                self._thread.join(_NOTICE_WITHIN_S)
        for outbox in self._outboxes:
            outbox.close()

    def _receive(self, chunks: Iterator[Chunk]) -> None:
        problem: Exception = RuntimeError("the loader workers ended unasked")
        try:
            for chunk in chunks:
                self._deliver(chunk)
        except Exception as error:
            problem = error
            # Tracebacks would keep the iterator, and so the workers, alive.
            problem.__traceback__ = problem.__cause__ = problem.__context__ = None
        self._dismiss()
        if not self._stopping:
            self._fail(problem)

    def _dismiss(self) -> None:
        for outbox in self._outboxes:
            with suppress(OSError):  # that worker is gone, or it was told before
                outbox.send(None)


def _chunks(
    loader: DataLoader[Any], service: FetchService, generator: torch.Generator
) -> Iterator[Chunk]:
    """Run ``service`` in torch's own workers, as many and as set up as the user's loader asks."""
    with warnings.catch_warnings():
        # The user's own loader has said so already.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        inner: DataLoader[Any] = DataLoader(
            service,
            batch_size=None,
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=WorkerInit(loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator,
            prefetch_factor=_TASKS_PER_WORKER,
            in_order=False,
        )
        return iter(inner)


def _as_it_is(chunk: Any) -> Any:
    return chunk
