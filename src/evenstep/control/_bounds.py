"""How small and how large a worker's batch may get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .._types import Cluster, IntArray
from ..exceptions import invalid

Sizes = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on every worker's samples.

    Args:
        min: smallest local batch; one number for all workers or one each. ``"auto"`` is 1, and 2
            for models with local batch normalisation, which cannot normalise a single sample.
            At 0 a worker may be left out entirely, and is then not measured any more.
        max: most samples that fit into a worker's memory at once, likewise; None is no cap.
            Plain loops never get more. Loops over ``loader.steps()`` may be given more, and get
            it as micro-batches of at most this size. ``"probe"`` has every worker find out by
            trial in its first step, in loops that call ``step.backward(closure)``.
        granularity: samples that come and go together, likewise, such as 8 for tensor cores.
        vary: what differs between workers. ``"size"``: a local batch is one forward of any size,
            or as few as ``max`` allows. ``"count"``: every forward has ``granularity`` samples,
            one number for all workers, and a worker gets as many of them as suits it: the one
            shape that compiled models and CUDA graphs are made for. Needs a loop over
            ``loader.steps()`` and a global batch of whole granules. The short last step of an
            epoch may have smaller forwards, unless ``DataLoader(drop_last=True)`` leaves it out.

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
        min_forwards: int = 1,
    ) -> Cluster:
        """Return the cluster within these bounds.

        Args:
            world_size: number of workers.
            global_batch_size: samples per optimizer step.
            smallest: what ``min="auto"`` stands for here.
            caps: most samples each worker may be given, ``(world_size,)``; None is no cap.
            min_forwards: fewest forwards that every worker takes in a step.

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
        return Cluster(
            world_size,
            global_batch_size,
            min_batch_size=self._least(smallest, min_forwards),
            max_batch_size=caps,
            granularity=_spread(self.granularity),
        )

    @property
    def forward_size(self) -> int:
        """The samples of every forward with ``vary="count"``."""
        assert isinstance(self.granularity, int)
        return self.granularity

    def _least(self, smallest: int, min_forwards: int) -> int | IntArray:
        """Return the smallest sizes, with room for as many forwards of a granule each."""
        granule = np.asarray(self.granularity, dtype=np.int64)
        room: IntArray = granule * min_forwards if min_forwards > 1 else np.asarray(0)
        if self.min == "auto":
            return np.maximum(smallest, room) if room.ndim else max(smallest, int(room))
        least = np.asarray(self.min, dtype=np.int64)
        if (least < room).any():
            raise invalid(
                "Bounds(min=...)",
                f"leave room for {min_forwards} micro-batches of {self.granularity} on every rank",
                self.min,
                "With FSDP2 a rank's time is taken from the micro-batches before its last: leave "
                "`min` at 'auto'.",
            )
        return least if least.ndim else int(least)

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
        given = np.asarray(self.max, dtype=np.int64)
        if given.shape not in ((), (world_size,)):
            raise invalid(
                "Bounds(max=...)",
                f"be one number or {world_size} of them",
                self.max,
                "Give one for all workers, or one each.",
            )
        return np.broadcast_to(given, (world_size,)).copy()


def _spread(sizes: Sizes) -> int | IntArray:
    return sizes if isinstance(sizes, int) else np.asarray(sizes, dtype=np.int64)


def _check(name: str, value: object, *, least: int) -> None:
    given = value if isinstance(value, tuple) else (value,)
    if any(type(size) is not int or size < least for size in given) or not given:
        raise invalid(
            f"Bounds({name}=...)",
            f"be an integer >= {least}, or a tuple of one for each worker",
            repr(value),
            "Count whole samples.",
        )
