"""What is summed on which ranks, in how many chunks, and what their links carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ..._types import FloatArray, check_range, check_ranks, own
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
        check_integer("Aggregation(world_size=...)", world_size, 1, "Count all ranks.")
        check_integer(
            "Aggregation(num_bytes=...)", num_bytes, 1, "Give the bytes of all gradients."
        )
        if num_chunks is not None:
            remedy = "1 is a barrier, None the limit of many."
            check_integer("Aggregation(num_chunks=...)", num_chunks, 1, remedy)
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


def check_integer(argument: str, value: Any, least: int, remedy: str) -> None:
    """Raise unless it is a plain integer, of at least ``least``."""
    if type(value) is not int or value < least:
        raise invalid(argument, f"be an integer >= {least}", repr(value), remedy)


def _roles(name: str, value: BoolArray | None, world_size: int) -> BoolArray:
    """Return a read-only array of our own; all ranks for None."""
    roles = np.ones(world_size, np.bool_) if value is None else np.array(value)
    if roles.shape != (world_size,) or roles.dtype != np.bool_ or not roles.any():
        rule = f"be {world_size} booleans, one at least true"
        raise invalid(f"Aggregation({name}=...)", rule, value, "Give one per rank.")
    roles.flags.writeable = False
    return roles


REMEDY = "Measure it, or leave the rank out."


@final
@dataclass(frozen=True, slots=True, eq=False, init=False)
class Links:
    """Measured bandwidths, in bytes per second.

    A rank's bandwidth is that to all others together, when all ranks send at once. If links were
    only tested pair by pair, one at a time, they look faster than that: give both.

    Args:
        up_bytes_per_s: what each rank can send, positive and finite, ``(world_size,)``.
        down_bytes_per_s: what each rank can receive, positive and finite, ``(world_size,)``; None
            is as much as it can send.
        pair_bytes_per_s: bandwidth from one rank (row) to another (column), positive, infinite if
            only the ranks' own links limit it, ``(world_size, world_size)``. Its diagonal is
            ignored.
        latency_s: time that every chunk adds, whatever its size, finite and at least 0.
        half_duplex: whether a link either sends or receives. With equal bandwidths it is also a
            limit on the sum of both directions.

    Attributes:
        up_bytes_per_s, down_bytes_per_s, pair_bytes_per_s: read-only, as above.

    Raises:
        ValueError: an argument has another shape, or is out of range.
    """

    up_bytes_per_s: FloatArray
    down_bytes_per_s: FloatArray
    pair_bytes_per_s: FloatArray | None
    latency_s: float
    half_duplex: bool

    def __init__(
        self,
        up_bytes_per_s: FloatArray,
        down_bytes_per_s: FloatArray | None = None,
        *,
        pair_bytes_per_s: FloatArray | None = None,
        latency_s: float = 0.0,
        half_duplex: bool = False,
    ) -> None:
        up = _bandwidth("up_bytes_per_s", up_bytes_per_s, None)
        given = up if down_bytes_per_s is None else down_bytes_per_s
        down = _bandwidth("down_bytes_per_s", given, len(up))
        pair = None if pair_bytes_per_s is None else _pairs(pair_bytes_per_s, len(up))
        rule, remedy = "finite and at least 0", "Measure an empty message."
        check_range("Links(latency_s=...)", latency_s, rule, remedy)
        values = (up, down, pair, float(latency_s), bool(half_duplex))
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)  # past the frozen guard, as a generated one goes

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.up_bytes_per_s)

    @property
    def bandwidth_bytes_per_s(self) -> FloatArray:
        r"""What each rank can send while it receives equally much, ``(world_size,)``.

        $b_i = \min(e_i, g_i)$ of up and down, or $1 / (1/e_i + 1/g_i)$ if half duplex.
        """
        up, down = self.up_bytes_per_s, self.down_bytes_per_s
        return 1 / (1 / up + 1 / down) if self.half_duplex else np.minimum(up, down)


def check_world(function: str, aggregation: Aggregation, links: Links) -> None:
    """Raise unless both speak of the same ranks."""
    if links.world_size != aggregation.world_size:
        rule = f"speak of the aggregation's {aggregation.world_size} ranks"
        raise invalid(
            f"{function}(links=...)", rule, links.world_size, "Give one bandwidth per rank."
        )


def _bandwidth(name: str, value: FloatArray, world_size: int | None) -> FloatArray:
    """Return a read-only array of our own."""
    answer = own(value, np.float64)
    argument = f"Links({name}=...)"
    if answer.ndim != 1 or not answer.size or len(answer) != (world_size or len(answer)):
        rule = f"have shape ({world_size or 'world_size'},)"
        raise invalid(argument, rule, answer.shape, "Give one bandwidth per rank.")
    valid = np.isfinite(answer) & (answer > 0)
    check_ranks(argument, answer, valid, "be positive and finite", REMEDY)
    return answer


def _pairs(value: FloatArray, world_size: int) -> FloatArray:
    """Return a read-only array of our own, infinite on its diagonal."""
    answer = np.array(value, np.float64)
    argument = "Links(pair_bytes_per_s=...)"
    if answer.shape != (world_size, world_size) or not world_size:
        rule = f"have shape ({world_size}, {world_size})"
        raise invalid(argument, rule, answer.shape, "Give a row of all ranks per rank.")
    np.fill_diagonal(answer, np.inf)
    valid = answer > 0
    if not valid.all():
        row, column = (int(index) for index in np.unravel_index(np.argmin(valid), valid.shape))
        got = f"{answer[row, column]} from rank {row} to {column}"
        raise invalid(argument, "be positive between any two ranks", got, REMEDY)
    answer.flags.writeable = False
    return answer
