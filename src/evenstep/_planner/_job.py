"""What is planned for: the job, and the limits that its user sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .._types import Cluster, IntArray
from ..exceptions import invalid

Sizes = int | tuple[int, ...]
_NO_CAP = 1 << 40


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on every worker's samples.

    Args:
        min: smallest local batch; one number for all workers or one each. ``"auto"`` is 1, and 2
            for models with local batch normalization, which cannot normalize a single sample.
            At 0 a worker may be left out entirely, and is then no longer measured.
        max: most samples that fit into a worker's memory at once, one number for all workers or
            one each; None is no cap. Plain loops never get more. Loops over ``loader.steps()`` may
            get more, as micro-batches of at most this size. With ``"probe"`` every worker finds
            its limit by trial in the first step, in loops that call ``step.backward(closure)``.
        granularity: samples that stay together, such as 8 for tensor cores; one number for all
            workers or one each.
        vary: what differs between workers. ``"size"``: a local batch is one forward of any size,
            or as few as ``max`` allows. ``"count"``: every forward has ``granularity`` samples,
            one number for all workers, and faster workers get more forwards. This gives compiled
            models and CUDA graphs a single shape. It needs a loop over ``loader.steps()`` and a
            global batch of whole granules. The short last step of an epoch may have smaller
            forwards, unless ``DataLoader(drop_last=True)`` leaves it out.

    Raises:
        ValueError: a number is out of range, or does not go with ``vary``.
    """

    min: Literal["auto"] | Sizes = "auto"
    max: Literal["probe"] | Sizes | None = None
    granularity: Sizes = 1
    vary: Literal["size", "count"] = "size"

    def __post_init__(self) -> None:
        if self.min != "auto":
            _check("min", self.min, least=0)
        if self.max is not None and self.max != "probe":
            _check("max", self.max, least=1)
        _check("granularity", self.granularity, least=1)
        if self.vary not in ("size", "count"):
            raise invalid(
                "Bounds(vary=...)",
                'be "size" or "count"',
                repr(self.vary),
                'Use "count" to keep every forward at `granularity` samples.',
            )
        if self.vary == "count":
            self._check_count()

    def cluster(
        self,
        world_size: int,
        global_batch_size: int,
        *,
        smallest: int,
        caps: IntArray | None = None,
    ) -> Cluster:
        """Return the cluster within these bounds.

        Args:
            world_size: number of workers.
            global_batch_size: samples per optimizer step.
            smallest: what ``min="auto"`` stands for here.
            caps: most samples each worker may be given, ``(world_size,)``; None is no cap.

        Raises:
            ValueError: the bounds leave no way to split the global batch.
        """
        if self.vary == "count" and global_batch_size % self.forward_size:
            raise invalid(
                "Bounds(granularity=...)",
                f"divide the global batch of {global_batch_size} with `vary='count'`",
                self.granularity,
                f"Change one of the two, the global batch to "
                f"{-(-global_batch_size // self.forward_size) * self.forward_size}, say.",
            )
        least = _each("min", smallest if self.min == "auto" else self.min, world_size)
        granule = _each("granularity", self.granularity, world_size)
        self._check_room(global_batch_size, least, granule, caps)
        return Cluster(
            world_size,
            global_batch_size,
            min_batch_size=least,
            max_batch_size=caps,
            granularity=granule,
        )

    @property
    def forward_size(self) -> int:
        """The samples of every forward with ``vary="count"``."""
        assert isinstance(self.granularity, int)
        return self.granularity

    def _check_room(
        self, total: int, least: IntArray, granule: IntArray, caps: IntArray | None
    ) -> None:
        """Raise, in the words of these bounds, where they leave no way to split ``total``."""
        lowest = -(-least // granule) * granule
        if total < lowest.sum():
            raise self._too_large(total, lowest)
        if caps is None:
            return
        highest = np.where(caps < total, caps // granule * granule, total)
        given = self.caps(len(granule))
        is_given = given is not None and np.array_equal(caps, given)
        above = lowest > highest
        if above.any():
            rank = int(np.argmax(above))
            low, high = lowest[rank], highest[rank]
            if not is_given:
                raise ValueError(f"rank {rank} fits {high} samples, and is to get at least {low}")
            raise invalid(
                "Bounds(min=..., max=...)",
                "satisfy min <= max on every rank, in whole granules",
                f"{low} and {high} in granules of {granule[rank]} on rank {rank}",
                "Raise `max`, or lower `min` or `granularity`.",
            )
        if total > highest.sum():
            found = f"{_listed(highest)}, {highest.sum()} in all"
            if not is_given:
                raise ValueError(f"workers fit {found}, and the global batch is {total}")
            raise invalid(
                "Bounds(max=...)",
                f"add up to the global batch of {total} at least, in whole granules",
                found,
                "Raise it, lower the global batch, or loop over `loader.steps()`, where it bounds "
                "a micro-batch.",
            )

    def _too_large(self, total: int, lowest: IntArray) -> ValueError:
        """Return the error of least sizes that exceed the global batch."""
        found = f"{_listed(lowest)}, {lowest.sum()} in all"
        remedy = "Lower it, raise the global batch, or train on fewer workers."
        if self.min != "auto":
            rule = f"add up to the global batch of {total} at most, in whole granules"
            return invalid("Bounds(min=...)", rule, found, remedy)
        if np.max(self.granularity) > 1:
            rule = f"leave every worker its least of the global batch of {total}, in whole granules"
            return invalid("Bounds(granularity=...)", rule, found, remedy)
        rule = f"leave every worker the least that its model needs, {found}"
        remedy = "Raise it, or train on fewer workers."
        return invalid("Balancer(global_batch_size=...)", rule, total, remedy)

    def _check_count(self) -> None:
        if not isinstance(self.granularity, int):
            raise invalid(
                "Bounds(granularity=...)",
                "be one number with `vary='count'`",
                self.granularity,
                "It is the size of every forward, the same on all workers.",
            )
        if isinstance(self.max, (int, tuple)) and np.min(self.max) < self.granularity:
            raise invalid(
                "Bounds(max=...)",
                f"be at least the granularity, {self.granularity}, with `vary='count'`",
                self.max,
                "Every forward has that many samples: lower `granularity`.",
            )

    def caps(self, world_size: int) -> IntArray | None:
        """Return ``max`` per worker, ``(world_size,)``, or None if there is none yet."""
        if self.max is None or self.max == "probe":
            return None
        return _each("max", self.max, world_size)


def _each(name: str, sizes: Sizes, world_size: int) -> IntArray:
    """Return one size per worker, ``(world_size,)``."""
    given = np.asarray(sizes, dtype=np.int64)
    if given.shape not in ((), (world_size,)):
        raise invalid(
            f"Bounds({name}=...)",
            f"be one number or {world_size} of them",
            sizes,
            "Give one for all workers, or one each.",
        )
    return np.broadcast_to(given, (world_size,)).copy()


def _listed(sizes: IntArray) -> str:
    """Return one number where all are alike, the first of them otherwise."""
    if (sizes == sizes[0]).all():
        return f"{sizes[0]} each"
    return " ".join(map(str, sizes[:16].tolist())) + (" ..." if len(sizes) > 16 else "")


def _check(name: str, value: object, *, least: int) -> None:
    given = value if isinstance(value, tuple) else (value,)
    if any(type(size) is not int or size < least for size in given) or not given:
        raise invalid(
            f"Bounds({name}=...)",
            f"be an integer >= {least}, or a tuple of one for each worker",
            repr(value),
            "Count whole samples.",
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What a planner plans for.

    Attributes:
        world_size: number of workers.
        global_batch_size: samples of a full step.
        tail_size: samples of the short last step of an epoch; 0 if there is none.
        bounds: limits on every worker's samples.
        smallest: what ``Bounds(min="auto")`` stands for.
        tail_smallest: smallest local batch in the short last step, 0 where none is needed.
        cuts: whether the loop takes micro-batches, so that caps limit one forward and not the
            whole local batch.
        most: largest local batches, one each, in place of ``bounds.max``; 0 is no samples at all.
        varies: whether steps may have other numbers of samples than the global batch.
    """

    world_size: int
    global_batch_size: int
    tail_size: int = 0
    bounds: Bounds = field(default_factory=Bounds)
    smallest: int = 1
    tail_smallest: int = 0
    cuts: bool = False
    most: tuple[int, ...] | None = None
    varies: bool = False

    def caps(self) -> IntArray | None:
        """Return the largest sizes that were given, ``(world_size,)``; None if none were."""
        if self.most is not None:
            return np.array(self.most, np.int64)
        return self.bounds.caps(self.world_size)

    def cluster(self, caps: IntArray | None) -> Cluster:
        """Return what the policy plans for, with no worker above ``caps`` in one forward.

        Raises:
            ValueError: the bounds leave no way to split the global batch.
        """
        cluster = self.bounds.cluster(
            self.world_size,
            self.global_batch_size,
            smallest=self.smallest,
            caps=None if self.cuts else caps,
        )
        if self._by_count and caps is not None and (caps < self.bounds.forward_size).any():
            raise invalid(
                "Bounds(granularity=...)",
                f"fit into every worker's memory with `vary='count'`, {caps.tolist()} samples",
                self.bounds.forward_size,
                "Lower it: every forward has that many samples.",
            )
        return cluster

    def max_forward(self, caps: IntArray | None) -> IntArray | None:
        """Return the most samples that each worker puts through one forward; None is all it has.

        Args:
            caps: most samples that fit at once, ``(world_size,)``; None is no cap.
        """
        if self._by_count:
            return np.full(self.world_size, self.bounds.forward_size)
        if self.cuts:
            return caps
        if not self.varies:
            return None
        if caps is None or self.caps() is not None:
            return caps
        # Of a step that is larger than the global batch, all of which has fitted.
        return np.where(caps < self.global_batch_size, caps, _NO_CAP)

    @property
    def tail_granularity(self) -> int:
        """Samples that keep together in the short last step too: those of a fixed forward."""
        return self.bounds.forward_size if self._by_count else 1

    @property
    def _by_count(self) -> bool:
        return self.cuts and self.bounds.vary == "count"
