"""A small real cluster on this machine: processes that talk over gloo."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from logging.handlers import BufferingHandler
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

from .._exchange._internal import INTERNAL_FAULT
from ..exceptions import invalid

PRELOADED = ("evenstep.torch", "evenstep.testing", "torch._dynamo")
"""What the processes have in common, loaded once. The first DDP imports torch._dynamo, for seconds.

As long as nothing else has started the fork server before: it loads nothing later.
"""


class WorkerFailed(RuntimeError):
    """A worker raised, or ended without a result; the message holds its own traceback."""


def run_workers(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 120.0,
    check: bool = True,
    stop_after: int | None = None,
    allow_faults: bool = False,
) -> list[Any]:
    """Run ``function(rank, *arguments)`` in ``world_size`` processes and return their results.

    Each process is a fresh one with a gloo process group that spans all of them and one thread
    for arithmetic. ``function`` has to be importable: a top-level function of a module.

    Args:
        world_size: number of processes, at least 1. With 1 the group has a single member.
        function: what every process runs; its result has to be picklable.
        arguments: handed to every process, after its rank.
        timeout_s: after this many seconds, what still runs is killed and counts as failed.
        check: whether the first failure raises. If not, it stands in the place of the result.
        stop_after: kill the rest once so many have given results or died; None waits for all. For
            tests in which a worker never answers.
        allow_faults: whether a worker may have logged an internal fault of evenstep. If not, such a
            worker has failed: its training has gone on without balancing.

    Returns:
        The results, by rank.

    Raises:
        WorkerFailed: a worker raised, died or logged an internal fault, and ``check`` is on.
    """
    if world_size < 1:
        raise invalid("run_workers(world_size=...)", "be at least 1", world_size, "Use 1 or more.")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            store, given = str(Path(folder) / "store"), (function, arguments, allow_faults)
            process = context.Process(target=_work, args=(theirs, store, rank, world_size, *given))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            results = _collect(pipes, monotonic() + timeout_s, stop_after or world_size)
        finally:
            for process in processes:
                process.join(timeout=5.0 if stop_after is None else 0.5)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
    failed = [result for result in results if isinstance(result, WorkerFailed)]
    if check and failed:
        # All of them: the first rank's error may only be that another one ended.
        raise WorkerFailed("\n\n".join(map(str, failed)))
    return results


def _collect(pipes: list[Connection], deadline_s: float, num_results: int) -> list[Any]:
    """Wait for one result from each pipe, in any order, until there are enough."""
    results: list[Any] = [
        WorkerFailed(f"rank {rank} gave no result in time") for rank in range(len(pipes))
    ]
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    fewest = len(pipes) - num_results
    while len(waiting) > fewest and (left_s := deadline_s - monotonic()) > 0:
        ready = wait(list(waiting), timeout=left_s)
        for pipe in [pipe for pipe in waiting if pipe in ready]:
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
                results[rank] = value if succeeded else WorkerFailed(f"rank {rank}:\n{value}")
            except EOFError:
                results[rank] = WorkerFailed(f"rank {rank} died without a word")
    return results


def _work(
    pipe: Connection,
    store: str,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    allow_faults: bool,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Loader workers start as in a script, not as this process did: that takes seconds for each.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size))  # one machine, as Accelerate has to know
    warnings.filterwarnings("error", category=RuntimeWarning, module=r"evenstep\b")  # as by NaN
    # evenstep logs its own faults, after which training continues without balancing.
    logged = BufferingHandler(1000)
    logged.addFilter(lambda record: INTERNAL_FAULT in record.getMessage())
    logging.getLogger("evenstep").addHandler(logged)
    try:
        keys = dist.FileStore(store, world_size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo",
            store=keys,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        # A rank with nothing to exchange may be done, and gone, before another one is connected.
        keys.set(f"connected {rank}", "")
        keys.wait([f"connected {other}" for other in range(world_size)])
        result = function(rank, *arguments)
        if logged.buffer and not allow_faults:
            raise WorkerFailed("\n".join(map(logged.format, logged.buffer)))
        # By value: a tensor in shared memory would go away with its process.
        pipe.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
