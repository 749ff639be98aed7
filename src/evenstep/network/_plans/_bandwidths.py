"""What every rank's link carries, and the links between pairs of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from ..._types import FloatArray
from ...exceptions import invalid
from ._aggregation import Aggregation

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
        down = up
        if down_bytes_per_s is not None:
            down = _bandwidth("down_bytes_per_s", down_bytes_per_s, len(up))
        pair = None
        if pair_bytes_per_s is not None:
            pair = _pairs(pair_bytes_per_s, len(up))
        if not (np.isfinite(latency_s) and latency_s >= 0):
            rule = "be finite and at least 0"
            raise invalid("Links(latency_s=...)", rule, latency_s, "Measure an empty message.")
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
    answer = np.array(value, np.float64)
    argument = f"Links({name}=...)"
    if answer.ndim != 1 or not answer.size or len(answer) != (world_size or len(answer)):
        rule = f"have shape ({world_size or 'world_size'},)"
        raise invalid(argument, rule, answer.shape, "Give one bandwidth per rank.")
    valid = np.isfinite(answer) & (answer > 0)
    if not valid.all():
        rank = int(np.argmin(valid))
        got = f"{answer[rank]} on rank {rank}"
        raise invalid(argument, "be positive and finite on every rank", got, REMEDY)
    answer.flags.writeable = False
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
