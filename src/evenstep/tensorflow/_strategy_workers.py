"""Who trains together, as the strategy knows it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ..exceptions import invalid

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
        raise invalid(
            "Balancer(strategy=...)",
            "be a `tf.distribute.Strategy`",
            repr(strategy),
            "Give `tf.distribute.MultiWorkerMirroredStrategy()`.",
        )
    num_named = _check_environment(os.environ)
    workers = cluster_of(strategy)
    world_size = workers.world_size
    if strategy.num_replicas_in_sync != world_size:
        raise invalid(
            "Balancer(strategy=...)",
            f"have one replica for each of its {world_size} workers",
            strategy.num_replicas_in_sync,
            "Start one process for each device, each with its own entry in TF_CONFIG, and let it "
            "see that device alone (CUDA_VISIBLE_DEVICES).",
        )
    if num_named > world_size:
        raise invalid(
            "Balancer(strategy=...)",
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
        raise invalid(
            "Balancer(strategy=...)",
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
