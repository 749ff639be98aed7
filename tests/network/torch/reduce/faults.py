"""What the workers of the fault tests of the sharded aggregation run."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evenstep.exceptions import WorkerLostError
from evenstep.network._torch._hook import shard_gradients
from evenstep.network._torch._transport import AbstractTransport, GlooTransport, PeerFailed, Pending

from .runs import Net, open_reducer, randoms, split_of

Outcome = tuple[str, int, float, str]


class Dying(AbstractTransport):
    """Passes everything on until so many sends were asked for; then the process is hit."""

    def __init__(self, inner: AbstractTransport, num_sends: int, sent: signal.Signals) -> None:
        self.inner, self.num_sends, self.sent = inner, num_sends, sent
        self.rank, self.world_size = inner.rank, inner.world_size

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        return self.inner.receive(buffer, source, tag)

    def send(self, buffer: torch.Tensor, target: int, tag: int) -> Pending:
        pending = self.inner.send(buffer, target, tag)
        self.num_sends -= 1
        if self.num_sends == 0:
            os.kill(os.getpid(), self.sent)
        return pending

    def break_off(self) -> None:
        self.inner.break_off()


def train(
    rank: int,
    victim: int,
    sent: signal.Signals,
    workers: list[int],
    shares: list[float],
    timeout_s: float,
) -> Outcome:
    """Return what ended training or serving here, whom it names, when, and threads left."""
    group = dist.new_group(workers)
    reducer = open_reducer(workers=workers, timeout_s=timeout_s)
    if rank == victim:
        dying = Dying(reducer._transport, 100, sent)
        reducer._pipeline._transport = dying
    began_s = monotonic()
    try:
        with reducer:
            if rank not in workers:
                reducer.serve()
                return "served", -1, 0.0, ""
            model = DistributedDataParallel(Net(torch.float32), process_group=group)
            shard_gradients(model, reducer)
            for epoch in range(50):
                reducer.adopt(split_of(shares, epoch, chunk_bytes=600))
                began_s = monotonic()
                model(randoms(rank, 24).reshape(1, 24), extra=True).sum().backward()
    except WorkerLostError as error:
        return str(error), error.rank, monotonic() - began_s, threads_left()
    return "nothing happened", -1, 0.0, ""


def threads_left() -> str:
    """Return the names of our threads that still run."""
    return ",".join(t.name for t in threading.enumerate() if t.name.startswith("evenstep"))


def close_early(rank: int) -> tuple[str, int, float, str]:
    """Rank 1 leaves its backward in the middle and closes, as after an error of the user's."""
    outcome = "nothing happened", -1
    began_s = monotonic()
    try:
        with open_reducer(timeout_s=20) as reducer:
            reducer.adopt(split_of([1, 1, 1], 0))
            reducer.reduce(randoms(rank, 5000), ends=False).wait()
            if rank == 1:
                raise ZeroDivisionError
            reducer.reduce(randoms(rank, 5000))
            reducer.settle()
    except ZeroDivisionError:
        outcome = "left", -1
    except WorkerLostError as error:
        outcome = str(error), error.rank
    seconds = monotonic() - began_s
    dist.barrier()  # the process of the one that left lives on
    return *outcome, seconds, threads_left()


def raise_in_the_thread(rank: int) -> Any:
    """Return what becomes of an error of the issuing thread's own, on the ranks."""
    try:
        with open_reducer(timeout_s=20) as reducer:
            reducer.adopt(split_of([1, 1], 0))
            if rank == 1:
                reducer._pipeline._workers = None  # a bug of ours
            future = reducer.reduce(randoms(rank, 5000))
            try:
                future.wait()
            except RuntimeError as error:
                first = str(error)
            reducer.settle()
    except Exception as error:
        return first, type(error).__name__, str(error), threads_left()
    return "nothing happened"


def ask_a_closed_connection(rank: int) -> list[int]:
    """Rank 1 breaks off; return whom rank 0 finds to have failed, asked once more."""
    transport = GlooTransport(dist.new_group())
    dist.barrier()  # in the group of all: a rank still connecting would take it for a crash
    failed: list[int] = []
    if rank == 1:
        transport.break_off()
        return failed
    with suppress(RuntimeError):
        transport.receive(torch.zeros(1), 1, 5)(None)
    for ask in (transport.receive, transport.send):
        try:
            ask(torch.zeros(1), 1, 6)(None)
        except PeerFailed as error:
            failed.append(error.peer)
    return failed


SCRIPT = """
import atexit, os, sys, torch, torch.distributed as dist
from datetime import timedelta
import numpy as np
from evenstep.network import Split
from evenstep.network._torch._transport import GlooTransport
from evenstep.network._torch._reducer import ShardedReducer

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2,
    timeout=timedelta(seconds=30),
)
reducer = ShardedReducer(GlooTransport(dist.new_group(backend="gloo")), workers=[0])
if rank == 0:
    reducer.start()
    reducer.adopt(Split.of(np.array([0.5, 0.5])))
    reducer.reduce(torch.ones(1 << 20)).wait()
    if not (child := os.fork()):
        atexit._run_exitfuncs()  # ours among them; what torch's groups do in a fork is theirs
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    reducer.reduce(torch.ones(1 << 20)).wait()
else:
    reducer.serve()
print("end", flush=True)
"""
