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
            it as micro-batches of at most this size.
        granularity: samples that come and go together, likewise, such as 8 for tensor cores.

    Raises:
        ValueError: a number is out of range.
    """

    min: Literal["auto"] | Sizes = "auto"
    max: Sizes | None = None
    granularity: Sizes = 1

    def __post_init__(self) -> None:
        if self.min != "auto":
            _check("min", self.min, least=0)
        if self.max is not None:
            _check("max", self.max, least=1)
        _check("granularity", self.granularity, least=1)

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
        least = smallest if self.min == "auto" else self.min
        return Cluster(
            world_size,
            global_batch_size,
            min_batch_size=_spread(least),
            max_batch_size=caps,
            granularity=_spread(self.granularity),
        )

    def caps(self, world_size: int) -> IntArray | None:
        """Return ``max`` per worker, ``(world_size,)``, or None if there is none."""
        if self.max is None:
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
