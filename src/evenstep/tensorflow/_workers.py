"""Who trains together, as the strategy knows it, and the two things taken from inside of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import (
    context,  # not public: see `share_by_service` and `abort_collectives`
)

from ..exceptions import invalid

_WAIT_MS = 120_000


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a strategy, one replica each.

    Attributes:
        rank: this process; the chief is 0.
        hosts: host of every rank, ``(world_size,)``.
    """

    rank: int
    hosts: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Their number."""
        return len(self.hosts)


def workers_of(strategy: Any) -> Workers:
    """Return who trains together under ``strategy``.

    Raises:
        ValueError: it is none that can be balanced.
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise invalid(
            "Balancer(strategy=...)",
            "be a `tf.distribute.Strategy`",
            repr(strategy),
            "Give `tf.distribute.MultiWorkerMirroredStrategy()`.",
        )
    hosts, rank = _cluster(strategy)
    if strategy.num_replicas_in_sync != len(hosts):
        raise invalid(
            "Balancer(strategy=...)",
            f"have one replica for each of its {len(hosts)} workers",
            strategy.num_replicas_in_sync,
            "Start one process for each device, each with its own entry in TF_CONFIG, and let it "
            "see that device alone (CUDA_VISIBLE_DEVICES).",
        )
    _check_environment(len(hosts))
    return Workers(rank, hosts)


def share_by_service() -> Callable[[Any], Any]:
    """Return a broadcast from rank 0, through the strategy's own coordination service.

    It is called once, with a value on rank 0 and with None elsewhere. All ranks make as many.
    """
    # Any other way is a collective, and those belong to the training alone.
    service = context.context()
    number = getattr(service, "_evenstep_runs", 0)  # the service never forgets a name
    service._evenstep_runs = number + 1
    name = f"evenstep/{number}"

    def share(value: Any) -> Any:
        if value is None:
            return json.loads(service.get_config_key_value(name, _WAIT_MS))
        service.set_config_key_value(name, json.dumps(value))
        return value

    return share


def abort_collectives(message: str) -> None:
    """End the collective that the training may be stuck in, with ``message`` as its error."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def _cluster(strategy: tf.distribute.Strategy) -> tuple[tuple[str, ...], int]:
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
    jobs = [job for job in ("chief", "worker") if spec.get(job)]
    addresses = [address for job in jobs for address in spec[job]]
    if len(addresses) < 2:
        return ("localhost",), 0
    before = len(spec["chief"]) if "chief" in jobs and resolver.task_type == "worker" else 0
    hosts = tuple(str(address).rpartition(":")[0] for address in addresses)
    return hosts, before + int(resolver.task_id)


def _check_environment(world_size: int) -> None:
    """Raise if there are workers that the strategy does not know of."""
    cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
    named = sum(len(cluster.get(job, ())) for job in ("chief", "worker"))
    if named > world_size:
        raise invalid(
            "Balancer(strategy=...)",
            f"have the {named} workers of TF_CONFIG",
            world_size,
            "Each process would train alone: use `tf.distribute.MultiWorkerMirroredStrategy`.",
        )
