"""The interface every policy implements, and the splits that policies start from and check."""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic

import numpy as np

from .._types import Cluster, Decision, IntArray, State, StepTimings
from ..exceptions import invalid
from ..solve._allocate import apportion

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


def check_one_each(argument: str, values: Sequence[Any], world_size: int) -> None:
    """Raise unless there are as many values as ranks."""
    if len(values) != world_size:
        rule, got = f"have {world_size} entries, one per rank", f"{len(values)} of them"
        raise invalid(argument, rule, got, "Add or remove some.")


LEAST_SAVING_S = 1e-3  # of a step: less is not worth leaving the equal split


def equal_split(cluster: Cluster) -> IntArray:
    """Return the split that plain data-parallel training uses, as far as the bounds let it."""
    size, rest = divmod(cluster.global_batch_size, cluster.world_size)
    unbound = cluster.min_batch_size.max() <= size < cluster.max_batch_size.min()
    if unbound and cluster.granularity.max() == 1:  # the common case, asked for at every step
        split = np.full(cluster.world_size, size)
        split[:rest] += 1
        return split
    return apportion(np.ones(cluster.world_size), cluster)


def is_feasible(batch_size: IntArray, cluster: Cluster) -> bool:
    """Say whether ``cluster`` allows the split: sum, bounds, granules on all workers but one."""
    return bool(
        batch_size.sum() == cluster.global_batch_size
        and (cluster.min_batch_size <= batch_size).all()
        and (batch_size <= cluster.max_batch_size).all()
        and np.count_nonzero(batch_size % cluster.granularity) <= 1
    )


def refit(batch_size: IntArray, cluster: Cluster) -> IntArray:
    """Return the split itself if it is feasible, else one in proportion to it."""
    if is_feasible(batch_size, cluster):
        return batch_size
    return apportion(np.maximum(batch_size, 1e-3), cluster)


def with_floor(cluster: Cluster) -> Cluster:
    """Return ``cluster`` with a smallest batch of one granule wherever it was zero.

    For rules that know a worker's speed only from the samples it has just computed: nothing
    would ever bring a worker at zero back. Left as it is where the global batch is too small.
    """
    one = np.where(cluster.granularity <= cluster.max_batch_size, cluster.granularity, 0)
    floor = np.maximum(cluster.min_batch_size, one)
    if floor.sum() > cluster.global_batch_size:
        return cluster
    return replace(cluster, min_batch_size=floor)


def within_reach(held: IntArray, cluster: Cluster, factor: float) -> Cluster:
    """Return ``cluster`` with bounds that keep every size within ``factor`` of a split it allows.

    In whole granules, and never tighter than the split itself. A worker at zero may get anything.
    """
    granule = cluster.granularity
    least = (held / factor // granule).astype(np.int64) * granule
    # Past the global batch a factor is no limit. An infinite one cannot be counted with.
    at_most = min(factor, float(cluster.global_batch_size))
    most = np.ceil(held * at_most / granule).astype(np.int64) * granule
    return replace(
        cluster,
        min_batch_size=np.maximum(cluster.min_batch_size, least),
        max_batch_size=np.where(
            held > 0, np.minimum(cluster.max_batch_size, most), cluster.max_batch_size
        ),
    )


def errors_by_chance(world_size: int) -> float:
    r"""Return the standard errors by which the slowest of equal workers may seem slow.

    $2 + \sqrt{2 \ln W}$: of $W$ equal workers the slowest looks slow by about the second part.
    What is gained against the equal split has to exceed that much to be no noise.
    """
    return 2 + math.sqrt(2 * math.log(world_size))
