"""What is summed, on which ranks, and in how many chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...exceptions import invalid

BoolArray = NDArray[np.bool_]


@final
@dataclass(frozen=True, slots=True, eq=False, init=False)
class Aggregation:
    r"""The gradients of a step, which ranks have them, which may sum them, and in how many chunks.

    Every worker *pushes* to each server its part of the gradients, servers sum, and every worker
    *pulls* the sums. Optimizers stay on the workers, so another plan moves no state. By default all
    ranks are workers and servers at once; such servers are called collocated. If ``is_server`` is
    the opposite of ``is_worker``, servers are dedicated; if some ranks only serve, it is mixed. A
    rank that only serves needs its own link: a second process behind a worker's link adds no
    bandwidth.

    Args:
        world_size: number of ranks, workers and servers together, at least 1.
        num_bytes: $V$, bytes of each worker's gradients, at least 1.
        num_chunks: $C$, number of chunks, at least 1; the push of one overlaps the pull of the one
            before. 1 is a barrier between push and pull. None is the limit of infinitely many
            chunks without latency.
        is_worker: ranks whose gradients are summed, by default all.
        is_server: ranks that may sum, by default all.

    Attributes:
        is_worker, is_server: read-only, ``(world_size,)``.

    Raises:
        ValueError: an argument is out of range or has another shape, no rank works, no rank
            serves, or a rank does neither.
    """

    world_size: int
    num_bytes: int
    num_chunks: int | None
    is_worker: BoolArray
    is_server: BoolArray

    def __init__(
        self,
        world_size: int,
        num_bytes: int,
        *,
        num_chunks: int | None = 1,
        is_worker: BoolArray | None = None,
        is_server: BoolArray | None = None,
    ) -> None:
        _check_integer("world_size", world_size, 1, "Count all ranks.")
        _check_integer("num_bytes", num_bytes, 1, "Give the bytes of all gradients.")
        if num_chunks is not None:
            _check_integer("num_chunks", num_chunks, 1, "1 is a barrier, None the limit of many.")
        workers = _roles("is_worker", is_worker, world_size)
        servers = _roles("is_server", is_server, world_size)
        if not (workers | servers).all():
            rank = int(np.argmin(workers | servers))
            rule, got = "give every rank something to do", f"nothing for rank {rank}"
            raise invalid(
                "Aggregation(is_worker=..., is_server=...)", rule, got, "Leave such a rank out."
            )
        values = (world_size, num_bytes, num_chunks, workers, servers)
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)  # past the frozen guard, as a generated one goes

    @property
    def num_workers(self) -> int:
        """Number of ranks that have gradients, $N$."""
        return int(self.is_worker.sum())

    @property
    def num_sources(self) -> NDArray[np.int64]:
        """From how many others each rank would get its part, $N$ or $N - 1$, ``(world_size,)``."""
        return self.num_workers - self.is_worker.astype(np.int64)


def _check_integer(name: str, value: Any, least: int, remedy: str) -> None:
    if type(value) is not int or value < least:
        rule = f"be an integer >= {least}"
        raise invalid(f"Aggregation({name}=...)", rule, repr(value), remedy)


def _roles(name: str, value: BoolArray | None, world_size: int) -> BoolArray:
    """Return a read-only array of our own; all ranks for None."""
    roles = np.ones(world_size, np.bool_) if value is None else np.array(value)
    if roles.shape != (world_size,) or roles.dtype != np.bool_ or not roles.any():
        rule = f"be {world_size} booleans, one at least true"
        raise invalid(f"Aggregation({name}=...)", rule, value, "Give one per rank.")
    roles.flags.writeable = False
    return roles
