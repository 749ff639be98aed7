"""Torch's own loader, piece by piece, and its workers: what runs in them, the pool of a rank."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import random
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from multiprocessing.connection import Connection
from operator import getitem
from threading import Thread, current_thread
from time import perf_counter
from typing import Any, Generic, TypeVar, final

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ...._private_torch import pinned
from ...._warning import warn
from ._chunks import Packed, pack

Answer = TypeVar("Answer")
_WORKER_S = 30.0  # within which a loader worker has to start and answer a question


@contextmanager
def same_chance(devices: Iterable[int] = ()) -> Iterator[None]:
    """Keep the random states of torch, numpy and Python as they are, whatever is drawn inside.

    Args:
        devices: of CUDA whose states are kept, beside the current one.
    """
    current = {torch.cuda.current_device()} if torch.cuda.is_initialized() else set()  # type: ignore[no-untyped-call]
    python = random.getstate()
    numpy = sys.modules.get("numpy.random")
    legacy = None if numpy is None else numpy.get_state()
    try:
        with torch.random.fork_rng(sorted(current.union(devices)), device_type="cuda"):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(legacy)


def seed_all(seed: int) -> None:
    """Seed what data sets draw from, alike on all ranks; no device is initialised."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        with suppress(TypeError, RuntimeError):  # of a bit generator of the script's own
            numpy.seed(seed % (1 << 32))


Wanted = list[int] | list[list[int]]
"""Indices of samples; or pairs of an index and the seed of what that sample draws."""


def fetch(dataset: Any, wanted: Wanted) -> list[Any]:
    """Return samples: by index in one go if the data set knows how to, by seed one by one."""
    if wanted and isinstance(wanted[0], list):
        return _fetch_seeded(dataset, wanted)
    indices: Any = wanted
    if not getattr(dataset, "__getitems__", None):
        return list(map(getitem, repeat(dataset), indices))
    samples = list(dataset.__getitems__(indices))
    if len(samples) != len(indices):
        raise ValueError(
            f"`__getitems__` must return {len(indices)} samples for as many indices, "
            f"got {len(samples)}. Return one per index, in their order."
        )
    return samples


def _fetch_seeded(dataset: Any, pairs: Any) -> list[Any]:
    """Return samples that draw from seeds of their own, and leave the random states alone."""
    samples = []
    with same_chance():
        for index, seed in pairs:
            seed_all(seed)
            samples += fetch(dataset, [index])
    return samples


def inner_loader(
    loader: DataLoader[Any], dataset: Any, generator: torch.Generator, **settings: Any
) -> DataLoader[Any]:
    """Return a loader of torch's over ``dataset``, with workers as the user's are set up.

    Args:
        loader: the user's own.
        dataset: what is loaded in place of its data set: with workers, ``InWorkers``.
        generator: draws what seeds the workers.
        settings: of the new ``DataLoader``, where it is not to yield items as they are.
    """
    settings = {
        "num_workers": loader.num_workers,
        "multiprocessing_context": loader.multiprocessing_context,
        "worker_init_fn": partial(_set_up, loader.worker_init_fn, gc.isenabled()),
        "batch_size": None,
        "collate_fn": _as_it_is,
    } | settings
    with warnings.catch_warnings():
        # The user's own loader has said so already.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        return _InnerLoader(dataset, generator=generator, **settings)


class _InnerLoader(DataLoader[Any]):
    """A loader whose forked workers collect nothing before ``_set_up`` freezes what they share."""

    def __iter__(self) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().__iter__()
        finally:
            if collects:
                gc.enable()


def asked(loader: DataLoader[Any], question: Callable[[], Answer]) -> Answer:
    """Return what ``question`` finds, with the random states left as they were.

    In a loader worker of its own where the loader has workers, set up as theirs, and never in this
    process then.
    """
    if loader.num_workers == 0:
        with same_chance():
            return question()
    timeout = max(_WORKER_S, loader.timeout)
    probe = InWorkers(loader.dataset, partial(_answers, question))
    (answer,) = inner_loader(loader, probe, torch.Generator(), num_workers=1, timeout=timeout)
    return answer  # type: ignore[no-any-return]


def _answers(question: Callable[[], Any]) -> Iterator[Any]:
    yield question()


class InWorkers(IterableDataset[Any]):
    """Yields what ``items`` does, in loader workers that show ``dataset`` to the user's code."""

    def __init__(self, dataset: Any, items: Callable[[], Iterator[Any]]) -> None:
        self.dataset = dataset
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items()


def _as_it_is(item: Any) -> Any:
    return item


def _set_up(function: Callable[[int], Any] | None, collects: bool, worker: int) -> None:
    """Show the user's code the user's data set, then run the user's ``worker_init_fn``."""
    # What was garbage when this process was forked is its parent's to collect. A process group
    # would wait here, in its destructor, for a thread that the parent alone has: for ever.
    gc.freeze()
    if collects:
        gc.enable()
    info = get_worker_info()
    assert info is not None
    service: Any = info.dataset
    # Past the frozen guard: `get_worker_info().dataset` is where such functions look.
    object.__setattr__(info, "dataset", service.dataset)
    if function is not None:
        function(worker)


def with_parts(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """Return a copy with other parts, past the guard that keeps them as they were made."""
    made = copy.copy(loader)
    made.__dict__.update(parts, _iterator=None)
    return made


def worker_generator(loader: DataLoader[Any]) -> torch.Generator:
    """Return a generator that draws the seed of the workers, and draw it from the loader's own.

    Where and when torch's loader does: given the same generators, the workers have the same seeds
    and a single process sees the same order.
    """
    source = torch.default_generator if loader.generator is None else loader.generator
    copy = torch.Generator()
    copy.set_state(source.get_state())
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=source)
    return copy


def pinning(
    loader: DataLoader[Any], collate: Callable[[Any], Any], *, warns: bool = True
) -> Callable[[Any], Any]:
    """Return ``collate``, whose batches are moved into pinned memory if the loader asks for that.

    For the thread that calls it: it takes over the device of this one. Without an accelerator
    nothing can come of it, which it ``warns`` of.
    """
    if not loader.pin_memory:
        return collate
    is_there = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if is_there else None
    if device is None:
        if warns:
            text = "`DataLoader(pin_memory=True)` has no effect: there is no accelerator."
            warn(text, UserWarning)
        return collate
    index = torch.accelerator.current_device_index()

    def pinned_batch(samples: Any) -> Any:
        torch.accelerator.set_device_index(index)
        return pinned(collate(samples), device.type)

    return pinned_batch


Asked = TypeVar("Asked")
"""What a task is for."""

_PARENT_CHECK_S = 5.0  # as often as torch's own workers look whether their parent is there
# Enough that a worker never waits for the next task, few enough that a task which a new plan
# makes urgent has at most this many in front of it.
_TASKS_PER_WORKER = 2
_STOP_WITHIN_S = 2.0
# Torch looks every 5 s whether a worker that sends nothing is still there.
_NOTICE_WITHIN_S = 6.0


Fetched = tuple[int, Packed, float]
"""The worker that fetched samples, they themselves, and the seconds that they took."""


def _serve(
    dataset: Any, inboxes: Sequence[Connection], merge: Callable[[list[Any]], Any] | None
) -> Iterator[Fetched]:
    """Yield the chunks that a loader worker is asked for, without end.

    Torch's loader runs it in each of its workers, which so start, are seeded, set up by
    ``worker_init_fn`` and stopped as in any loader. That loader prefetches by counting, and what
    it asks of an ``IterableDataset`` is merely the next item: which one, tasks say that arrive
    through a pipe for each worker, as late as can be.
    """
    info = get_worker_info()
    assert info is not None  # it runs in loader workers alone
    tasks: deque[Wanted] = deque()
    parent = os.getppid()
    while _receive(inboxes[info.id], tasks, parent):
        began_s = perf_counter()
        try:
            samples = fetch(dataset, tasks.popleft())
            fetch_s = perf_counter() - began_s
            content = pack(merge(samples) if merge else samples)
        except Exception as error:  # torch sends it
            _check_sendable(error, info.id)
            raise
        yield info.id, content, fetch_s


def _receive(inbox: Connection, tasks: deque[Wanted], parent: int) -> bool:
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
    that chunks arrive while the training thread computes. A pool is made and closed by the training
    thread: torch watches its workers through a signal handler which only the main thread can set.

    Args:
        loader: the user's, with at least one worker.
        generator: draws what seeds the workers.
        merge: applied to the samples of a chunk in the worker; None is to leave them.
        deliver: called by the receiving thread with what was asked for, its samples, and the
            seconds that they took.
        fail: called by the receiving thread, once, with why there will be no more.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        generator: torch.Generator,
        *,
        merge: Callable[[list[Any]], Any] | None,
        deliver: Callable[[Asked, Packed, float], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._deliver = deliver
        self._fail = fail
        self._closing = False
        self._asked: list[deque[Asked]] = [deque() for _ in range(loader.num_workers)]
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(loader.num_workers)]
        self._outboxes = [theirs for _, theirs in pipes]
        inboxes, dataset = [mine for mine, _ in pipes], loader.dataset
        chunks = iter(
            inner_loader(
                loader,
                InWorkers(dataset, partial(_serve, dataset, inboxes, merge)),
                generator=generator,
                prefetch_factor=_TASKS_PER_WORKER,
                in_order=False,
            )
        )
        # Torch has no public name for its workers. Of all children of this process, other threads
        # may have started some meanwhile, which are not ours to end.
        self._processes: tuple[Any, ...] = tuple(chunks._workers)  # type: ignore[attr-defined]
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
        if self._thread is not current_thread():
            # The thread itself comes here when it collects a forgotten loader.
            self._thread.join(_STOP_WITHIN_S)
            if self._thread.is_alive():
                for process in self._processes:
                    process.terminate()  # torch's workers take it from their parent as a clean end
                self._thread.join(_NOTICE_WITHIN_S)
        for outbox in self._outboxes:
            outbox.close()

    def _receive(self, chunks: Iterator[Fetched]) -> None:
        problem: Exception = RuntimeError("the loader workers ended unasked")
        try:
            for worker, content, fetch_s in chunks:
                self._deliver(self._asked[worker].popleft(), content, fetch_s)
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
