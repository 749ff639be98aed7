"""What an exchange by shares adds to a simulated step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ..._types import FloatArray
from ...exceptions import invalid
from .._plans._aggregation import Aggregation
from .._plans._bandwidths import Links
from .._plans._duration import exchange_s
from .._plans._optimum import equal_shares
from .._plans._ring import ring_s
from ._timeline import timeline_s


@final
@dataclass(frozen=True, slots=True, eq=False)
class SharedLinksComm:
    r"""Gradients are pushed, summed and pulled over links of unlike speed.

    A step ends as ``timeline_s`` has it: who is done early pushes early. Without
    shares it is a plain all-reduce that begins when the slowest is done,
    $\max(t, (1 - h) t + R)$ of a ring that takes $R$ and gradients that are ready over the
    last part $h$ of computing, and at least a chunk's part of $R$ after it.

    Args:
        aggregation: what is summed, by whom, in how many chunks; the simulated workers are its
            ranks, those that only serve included.
        links: what they carry.
        shares: part of the bytes that each rank sums, ``(world_size,)``; None for plain all-reduce.
        overlap: part of computing, at its end, during which gradients become ready, in [0, 1].

    Raises:
        ValueError: an argument is out of range, or they speak of other ranks.
    """

    aggregation: Aggregation
    links: Links
    shares: FloatArray | None = None
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            remedy = "0 exchanges at the end, 2/3 during the backward."
            raise invalid("SharedLinksComm(overlap=...)", "be in [0, 1]", self.overlap, remedy)
        shares = equal_shares(self.aggregation) if self.shares is None else self.shares
        exchange_s(self.aggregation, self.links, shares=shares)  # refuses those of other ranks

    def __call__(self, compute_s: FloatArray) -> float:
        """Return the seconds of a step, by when each worker ends computing, ``(world_size,)``."""
        if self.shares is not None:
            return timeline_s(
                compute_s, self.aggregation, self.links, shares=self.shares, overlap=self.overlap
            )
        slowest = float(compute_s[self.aggregation.is_worker].max())
        ring = ring_s(self.aggregation, self.links)
        last = ring / (self.aggregation.num_chunks or 64)
        return max((1 - self.overlap) * slowest + ring, slowest + last)
