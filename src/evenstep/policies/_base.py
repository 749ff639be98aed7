"""The interface every policy implements."""

from __future__ import annotations

import abc
import inspect
from typing import Any, ClassVar, Generic

import numpy as np

from .._types import Cluster, Decision, State, StepTimings
from ..exceptions import invalid

READING_S = 0.05
"""Seconds for which policies combine short steps, by the time from batch to batch.

Learning from a reading takes rank 0 about a millisecond, and every rank a message.
"""


class AbstractPolicy(abc.ABC, Generic[State]):
    """Decides how many samples each worker gets on the next step.

    A policy is an immutable value: hyperparameters are on ``self``, and everything that changes is
    in ``State``, which is plain enough for any checkpoint (see ``Decision``). It does no I/O, reads
    no clock and knows no framework, so the trainer and the simulator run the same object.

    A policy has to allow for three things. A measurement may arrive a step late, taken under the
    plan before. A wrapper or a driver may keep another split in force than the one decided. And the
    bounds of ``cluster`` may change from one update to the next, as a driver learns what fits in
    memory. The number of workers stays the same between two calls of ``init``.

    Attributes:
        name: its name in configurations, on the command line and in reports, such as
            ``"lb-bsp-2020"``.
    """

    __slots__ = ()

    name: ClassVar[str] = ""

    @property
    def reading_s(self) -> float:
        """Seconds for which short steps are combined before an ``update``; sizes stay meanwhile.

        With 0 the policy sees each step, however short. A larger value suits a policy that takes
        too long for steps of a few milliseconds: it sees the median of every worker
        (``StepTimings.num_steps``).
        """
        return 0.0

    @abc.abstractmethod
    def init(self, cluster: Cluster) -> Decision[State]:
        """Return the first decision, before anything is measured."""

    def guess(self, cluster: Cluster, timings: StepTimings, state: State) -> Decision[State] | None:
        """Return a decision by the first step of a run, or None to keep the sizes until the next.

        That step warms up: times contain what is done once. ``update`` is not shown it. A policy
        that takes them for what they are, an upper bound, may still save a step where workers are
        far apart. The papers' rules, and all other policies, keep the sizes.

        Args:
            cluster: what is planned for.
            timings: of that step.
            state: of ``init``, or of an earlier run.
        """
        return None

    @abc.abstractmethod
    def update(self, cluster: Cluster, timings: StepTimings, state: State) -> Decision[State]:
        """Return the next decision, leaving all arguments as they are."""


def check_policy(argument: str, value: Any, *, rule: str = "be a policy") -> None:
    """Raise unless ``value`` is a policy.

    Args:
        argument: the class and its argument, for the message.
        value: what was given for it.
        rule: what would do.

    Raises:
        ValueError: it is a class, no policy, or does not inherit from ``AbstractPolicy``.
    """
    if isinstance(value, AbstractPolicy):
        return
    remedy = "Give an instance, such as `Auto()`."
    given = value if inspect.isclass(value) else type(value)
    if issubclass(given, AbstractPolicy):
        remedy = f"Give an instance, `{given.__name__}(...)`, not the class."
    elif hasattr(given, "update"):
        remedy = f"Have `{given.__name__}` inherit from `evenstep.policies.AbstractPolicy`."
    raise invalid(argument, rule, repr(value), remedy)


def check_decision(decision: Decision[Any], cluster: Cluster, *, name: str) -> None:
    """Raise unless the sizes can be run as they are.

    Args:
        decision: of the policy.
        cluster: what it planned for.
        name: of the policy, for the words.

    Raises:
        TypeError: it is no decision, or its sizes are no array.
        ValueError: they are no integers, do not add up, or break the bounds or the granules.
    """
    if not isinstance(decision, Decision):
        raise TypeError(f"{name} gave {decision!r}, not a `Decision`")
    sizes = decision.batch_size
    if not isinstance(sizes, np.ndarray):
        raise TypeError(f"{name} gave {sizes!r}, not an array of {cluster.world_size} integers")
    if not np.issubdtype(sizes.dtype, np.integer) or sizes.shape != (cluster.world_size,):
        raise ValueError(f"{name} gave {sizes!r}, not {cluster.world_size} integers")
    if sizes.sum() != cluster.global_batch_size:
        raise ValueError(
            f"{name} gave {sizes.tolist()}, which add up to {sizes.sum()} and not to the "
            f"global batch of {cluster.global_batch_size}"
        )
    if not 0 <= decision.level <= 1:
        raise ValueError(f"{name} gave a level of {decision.level!r}, not a share in [0, 1]")
    outside = (sizes < cluster.min_batch_size) | (sizes > cluster.max_batch_size)
    if outside.any():
        rank = int(np.argmax(outside))
        raise ValueError(
            f"{name} gave rank {rank} {sizes[rank]} samples, outside "
            f"{cluster.min_batch_size[rank]} to {cluster.max_batch_size[rank]}"
        )
    granule = cluster.granularity
    if np.count_nonzero(sizes % granule) > 1:
        raise ValueError(
            f"{name} gave {sizes.tolist()}, more than one of them in no whole granules of "
            f"{granule.tolist()}"
        )
