"""TensorFlow's own coordination service, which the chief runs: the way before a run is open."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context  # not public: it has the service

from .._exchange._loss_watch import lost_worker
from ..exceptions import WorkerLostError
from ._exchange import TENSORFLOW
from ._workers import Workers

_TASK = re.compile(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)")


def asked(call: Callable[[], Any], workers: Workers, *, within_s: float) -> Any:
    """Return what a call of the service returns, or raise what it raises.

    In a thread of its own: a chief that stands still never answers.

    Raises:
        WorkerLostError: no answer came in time: the chief is lost.
    """
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, name="evenstep-service", daemon=True).start()
    try:
        answer, error = answers.get(timeout=within_s)
    except queue.Empty:
        raise _lost(workers, 0) from None
    if error is not None:
        raise error
    return answer


def missed(workers: Workers) -> WorkerLostError | None:
    """Return the loss of a worker whom the heartbeats of TensorFlow's own miss; on the chief alone.

    They begin with the strategy, and miss one that is silent for some 10 s. Elsewhere the call
    would keep all threads of the process from running if the chief stands still.
    """
    if workers.rank != 0 or not workers.jobs:
        return None
    states = context.context().get_task_states(list(workers.jobs))
    rank = next((rank for rank, state in enumerate(states) if state is not None), None)
    return None if rank is None else _lost(workers, rank)


def lost_behind(error: tf.errors.OpError, workers: Workers) -> WorkerLostError | None:
    """Return the loss that an error of the service's, or of a collective, is about.

    It names a task that is gone, or the service, which is the chief's; None where it does neither.
    """
    told = error.message.rpartition("}}")[2]  # before that, the place of the operation
    firsts, number = {}, 0
    for job, size in workers.jobs:
        firsts[job], number = number, number + size
    named = [firsts[job] + int(task) for job, task in _TASK.findall(told) if job in firsts]
    named += [0] if "CoordinationService" in told else []
    rank = next((rank for rank in named if rank != workers.rank), None)
    return None if rank is None else _lost(workers, rank)


def _lost(workers: Workers, rank: int) -> WorkerLostError:
    problem = "it ended, was killed, stopped or cut off before the first step"
    return lost_worker(rank, workers.hosts[rank], problem, done=-1, restart=TENSORFLOW.restart)
