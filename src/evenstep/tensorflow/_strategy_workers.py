"""Who trains together, and what workers send each other by TensorFlow's coordination service."""

from __future__ import annotations

import itertools
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, final

import tensorflow as tf
from tensorflow.python.eager import context  # not public: it has the service

from .._exchange._lost_ranks import lost_worker
from .._exchange._message_kinds import ENDED, ThreadLocation
from .._exchange._threads import Framework, file_of, frame_of, line_of_user
from ..exceptions import WorkerLostError, invalid

_refused = partial(invalid, "Balancer(strategy=...)")
_JOBS = ("chief", "worker")  # in the order of ranks


@dataclass(frozen=True, slots=True)
class StrategyWorkers:
    """The workers of a strategy, one replica each.

    Attributes:
        rank: this process; the chief is 0.
        hosts: host of every rank, ``(world_size,)``.
        jobs: their names in TensorFlow and how many tasks each has, in the order of ranks.
    """

    rank: int
    hosts: tuple[str, ...]
    jobs: tuple[tuple[str, int], ...] = ()

    @property
    def world_size(self) -> int:
        """Their number."""
        return len(self.hosts)


def workers_of(strategy: Any) -> StrategyWorkers:
    """Return who trains together under ``strategy``.

    Raises:
        ValueError: it cannot be balanced.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise _refused(
            "be a `tf.distribute.Strategy`",
            repr(strategy),
            "Give `tf.distribute.MultiWorkerMirroredStrategy()`.",
        )
    num_named = _check_environment(os.environ)
    workers = cluster_of(strategy)
    world_size = workers.world_size
    if strategy.num_replicas_in_sync != world_size:
        raise _refused(
            f"have one replica for each of its {world_size} workers",
            strategy.num_replicas_in_sync,
            "Start one process for each device, each with its own entry in TF_CONFIG, and let it "
            "see that device alone (CUDA_VISIBLE_DEVICES).",
        )
    if num_named > world_size:
        raise _refused(
            f"have the {num_named} workers of TF_CONFIG",
            world_size,
            "Each process would train alone: use `tf.distribute.MultiWorkerMirroredStrategy`.",
        )
    return workers


def cluster_of(strategy: tf.distribute.Strategy) -> StrategyWorkers:
    """Return the hosts and this process' place among them."""
    resolver = strategy.cluster_resolver
    spec = {} if resolver is None else resolver.cluster_spec().as_dict()
    if "ps" in spec:
        raise _refused(
            "sum gradients over its workers",
            type(strategy).__name__,
            "Use `tf.distribute.MultiWorkerMirroredStrategy`.",
        )
    jobs = [job for job in _JOBS if spec.get(job)]
    addresses = [address for job in jobs for address in spec[job]]
    if len(addresses) < 2:
        return StrategyWorkers(0, ("localhost",))
    before = len(spec["chief"]) if "chief" in jobs and resolver.task_type == "worker" else 0
    hosts = tuple(str(address).rpartition(":")[0].strip("[]") for address in addresses)
    numbers = tuple((job, len(spec[job])) for job in jobs)
    return StrategyWorkers(before + int(resolver.task_id), hosts, numbers)


def _check_environment(environment: Mapping[str, str]) -> int:
    """Return how many workers the environment names.

    Raises:
        ValueError: this process is to do something else, or the balancer is switched off.
    """
    switch = environment.get("EVENSTEP", "") or "on"
    if switch != "on":
        raise invalid(
            "EVENSTEP",
            "be left out with TensorFlow",
            repr(switch),
            "It switches scripts of PyTorch's off. Leave the balancer out of this one.",
        )
    config = json.loads(environment.get("TF_CONFIG") or "{}")
    part = config.get("task", {}).get("type", "worker")
    if part not in ("chief", "worker", "master"):
        raise invalid(
            "TF_CONFIG",
            "have a task of type 'chief' or 'worker' in a process that makes a `Balancer`",
            repr(part),
            "Evaluate, or serve parameters, in a script of its own, without one.",
        )
    cluster = config.get("cluster", {})
    return sum(len(cluster.get(job, ())) for job in _JOBS)


_WAITING = "/tensorflow/python/eager/execute.py"  # where a call of a graph waits for its end


def _place_of(thread_id: int) -> ThreadLocation:
    """Return where a thread is: never in a collective, as who is asked has not reported by then."""
    frame = frame_of(thread_id)
    if frame is None:
        return ENDED
    return ThreadLocation(line_of_user(frame), in_collective=False, compiling=False)


def _is_in_tensorflow(thread_id: int) -> bool:
    """Return whether a thread waits for a graph of TensorFlow's, perhaps with a collective."""
    frame = frame_of(thread_id)
    return frame is not None and file_of(frame).endswith(_WAITING)


TENSORFLOW = Framework(
    _place_of,
    _is_in_tensorflow,
    "start all workers anew; `BackupAndRestore` goes on in `fit`",
    # Plans are asked for by a thread of TensorFlow's data sets.
    training_thread=lambda: threading.main_thread().ident or 0,
)


_LOOK_S = 1.0
_TASK = re.compile(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)")
GONE = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
"""What a collective, or the service, raises where a worker is gone."""


def next_prefix(service: Any) -> str:
    """Return a prefix of keys that was not used before; all workers count alike."""
    number = getattr(service, "_evenstep_runs", 0)  # the service never forgets a name
    service._evenstep_runs = number + 1
    return f"evenstep/{number}"


@final
class ServiceRanks:
    """All workers, which send each other plain values. Collective: all make as many, in order.

    Any other way would be a collective of TensorFlow's, and those belong to the training alone.

    Args:
        workers: who trains together.
        wait_s: seconds to wait for a value.
        deadline_s: seconds without an answer of the service after which the chief is lost.

    Attributes:
        look: called once a second while others are late, and may raise; at first it looks whether
            TensorFlow still receives heartbeats from all workers.
    """

    def __init__(self, workers: StrategyWorkers, *, wait_s: float, deadline_s: float) -> None:
        self.rank, self.world_size = workers.rank, workers.world_size
        self.look: Callable[[], None] | None = None
        self._workers = workers
        self._wait_s = wait_s
        self._limit_s = _LOOK_S + deadline_s
        self._service = context.context()
        prefix = next_prefix(self._service)
        self._keys = (f"{prefix}/{each}" for each in itertools.count())

    def share(self, value: Any) -> Any:
        """Return on every worker what rank 0 was called with.

        Raises:
            ConnectionError: rank 0 did not call this in time.
            WorkerLostError: a worker is gone.
        """
        key = next(self._keys)
        if self.rank == 0:
            self._put(key, value)
            return value
        return self._get(key, 0)

    def collect(self, value: Any) -> list[Any]:
        """Return on every worker what each of them was called with, in order.

        Raises:
            ConnectionError: one of them did not call this in time.
            WorkerLostError: a worker is gone.
        """
        key = next(self._keys)
        self._put(f"{key}/{self.rank}", value)
        if self.rank == 0:
            try:
                values = [self._get(f"{key}/{rank}", rank) for rank in range(self.world_size)]
            except (ConnectionError, WorkerLostError) as error:
                self._put(key, {"rank": getattr(error, "rank", None), "problem": str(error)})
                raise
            self._put(key, values)
            return values
        match self._get(key, 0):
            case {"rank": None, "problem": problem}:
                raise ConnectionError(problem)
            case {"rank": rank, "problem": problem}:
                raise WorkerLostError(rank, problem)
            case values:
                return list(values)

    def _put(self, key: str, value: Any) -> None:
        self._asked(self._service.set_config_key_value, key, json.dumps(value))

    def _get(self, key: str, rank: int) -> Any:
        """Return the value of a rank, once it is there."""
        until_s = monotonic() + self._wait_s
        while True:
            limit_ms = max(int(1000 * min(until_s - monotonic(), _LOOK_S)), 1)
            try:
                return json.loads(self._asked(self._service.get_config_key_value, key, limit_ms))
            except WorkerLostError:
                if self.look is not None:
                    self.look()  # it may know more
                raise
            except tf.errors.DeadlineExceededError as error:
                (self.look or self._look)()
                if monotonic() < until_s:
                    continue
                raise ConnectionError(
                    f"Rank {rank} sent nothing within {self._wait_s:g} s. All workers have to "
                    f"begin training together. If some take longer to start, raise "
                    f"`Runtime(meeting_s=...)`."
                ) from error

    def _look(self) -> None:
        """Raise if TensorFlow's own heartbeats, which begin with the strategy, miss a worker.

        Only the chief asks for that: elsewhere the call would keep all threads of the process from
        running if the chief stands still.
        """
        jobs = self._workers.jobs
        states = self._service.get_task_states(list(jobs)) if self.rank == 0 and jobs else ()
        for rank, state in enumerate(states):
            if state is not None:
                raise _lost(self._workers, rank)
        # Whether the chief answers: a wait for a value ends in time without it.
        self._asked(self._service.delete_config_key_value, "evenstep/nothing")

    def _asked(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return what a call of the service returns; in time, whatever the chief does.

        In a thread of its own, since a chief that stands still never answers.
        """
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((call(*args), None))
            except Exception as error:
                answers.put((None, error))

        threading.Thread(target=run, name="evenstep-service", daemon=True).start()
        try:
            answer, error = answers.get(timeout=self._limit_s)
        except queue.Empty:
            raise _lost(self._workers, 0) from None
        if isinstance(error, (*GONE, tf.errors.FailedPreconditionError)):
            raise (lost_behind(error, self._workers) or error) from error
        if error is not None:
            raise error
        return answer


def lost_behind(error: tf.errors.OpError, workers: StrategyWorkers) -> WorkerLostError | None:
    """Return the loss that an error of the service's, or of a collective, is about.

    It names a task that is gone, or the service, which is the chief's; None where it does neither.
    """
    text = error.message.rpartition("}}")[2]  # before that, the place of the operation
    firsts, number = {}, 0
    for job, size in workers.jobs:
        firsts[job], number = number, number + size
    named = [firsts[job] + int(task) for job, task in _TASK.findall(text) if job in firsts]
    named += [0] if "CoordinationService" in text else []
    rank = next((rank for rank in named if rank != workers.rank), None)
    return None if rank is None else _lost(workers, rank)


def _lost(workers: StrategyWorkers, rank: int) -> WorkerLostError:
    problem = "it ended, was killed, stopped or cut off before the first step"
    return lost_worker(rank, workers.hosts[rank], problem, done=-1, restart=TENSORFLOW.restart)
