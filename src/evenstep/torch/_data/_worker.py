"""What runs inside a loader worker: fetch the samples asked for, nearest step first."""

from __future__ import annotations

import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ._pack import Packed, pack
from ._source import fetch

_PARENT_CHECK_S = 5.0  # as often as torch's own workers look whether anybody still needs them


@dataclass(frozen=True, slots=True)
class Task:
    """Samples to fetch in one go.

    Attributes:
        number: which task it is, in the order in which they were given out.
        indices: the data set's indices, at least one.
    """

    number: int
    indices: list[int]


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of the user's code, as text that survives the way between processes."""

    kind: type[Exception]
    message: str

    def error(self) -> Exception:
        """Return it as an exception of the same type, or RuntimeError if that takes more."""
        try:
            return self.kind(_Verbatim(self.message))
        except Exception:
            return RuntimeError(self.message)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What became of a task.

    Attributes:
        number: the task's.
        content: the samples, or why there are none.
        fetch_s: what they took, in seconds.
    """

    number: int
    content: Packed | Failure
    fetch_s: float


class FetchService(IterableDataset[Chunk]):
    """The user's data set as a service: an endless stream of the chunks it is asked for.

    Torch's loader runs one copy in each of its workers, which so start, are seeded, set up by
    ``worker_init_fn`` and stopped as in any loader. That loader prefetches by counting, and what
    it asks of an ``IterableDataset`` is merely the next item: which one, tasks say that arrive
    through a pipe, as late as can be.

    Args:
        dataset: the user's.
        inboxes: one end of a pipe for each worker; a Task is done, None ends the stream.
        merge: applied to the samples of a chunk before they are packed; None is to leave them.
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

    def __iter__(self) -> Iterator[Chunk]:
        info = get_worker_info()
        assert info is not None  # it runs in loader workers alone
        tasks: deque[Task] = deque()
        parent = os.getppid()
        while self._receive(self._inboxes[info.id], tasks, parent):
            yield self._do(tasks.popleft(), info.id)

    def _receive(self, inbox: Connection, tasks: deque[Task], parent: int) -> bool:
        """Move all messages into ``tasks``, at least one; return whether to go on."""
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

    def _do(self, task: Task, worker: int) -> Chunk:
        began_s = perf_counter()
        try:
            samples = fetch(self.dataset, task.indices)
            if len(samples) != len(task.indices):
                raise ValueError(
                    f"`__getitems__` must return {len(task.indices)} samples for as many indices, "
                    f"got {len(samples)}. Return one per index, in their order."
                )
            fetch_s = perf_counter() - began_s
            content: Packed | Failure = pack(self._merge(samples) if self._merge else samples)
        except Exception as error:
            fetch_s = perf_counter() - began_s
            content = _failure(error, worker)
        return Chunk(task.number, content, fetch_s)


class WorkerInit:
    """Shows the user's code the user's data set, then runs the user's ``worker_init_fn``."""

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        service: Any = info.dataset
        # Past the frozen guard: `get_worker_info().dataset` is where such functions look.
        object.__setattr__(info, "dataset", service.dataset)
        if self._function is not None:
            self._function(worker)


class _Verbatim(str):
    """Text that shows its line breaks where an exception shows its argument's repr: KeyError."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _failure(error: Exception, worker: int) -> Failure:
    name = type(error).__name__
    where = f"Caught {name} in DataLoader worker process {worker}."
    text = "".join(traceback.format_exception(error))
    try:
        kind = pickle.loads(pickle.dumps(type(error)))
    except Exception:
        kind = RuntimeError  # defined where the training process could not find it
    return Failure(kind, f"{where}\nOriginal {text}")
