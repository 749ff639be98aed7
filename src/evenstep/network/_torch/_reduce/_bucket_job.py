"""A bucket that is to be summed, and one chunk of it under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..._plans._split import Split
from ._transport import Pending


@dataclass(slots=True, eq=False)
class BucketJob:
    """One bucket on one rank.

    Attributes:
        gradients: flat and contiguous, overwritten by their mean; None on a rank without data.
        num_elements: how many they are on every rank.
        wire: the numbers in which they travel.
        split: who sums what.
        done: called on the issuing thread with None, or with the error that ended it.
        opens: whether it is the first bucket of a backward.
        ends: whether it is the last one.
        step: the step that it belongs to.
        ready: when the device has written the gradients; None where there is none.
        checks: called before its first sum; they raise where it must not be made.
        sends: notes to others that leave with it, by peer.
    """

    gradients: torch.Tensor | None
    num_elements: int
    wire: torch.dtype
    split: Split
    done: Callable[[BaseException | None], None]
    opens: bool = False
    ends: bool = False
    step: int = 0
    ready: torch.cuda.Event | None = None
    checks: list[Callable[[], None]] = field(default_factory=list)
    sends: list[tuple[int, Pending]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Receipt:
    """A range that is on its way here.

    Attributes:
        peer: who sends it.
        pending: the operation.
        num_bytes: its size.
    """

    peer: int
    pending: Pending
    num_bytes: int


@dataclass(slots=True, eq=False)
class Flight:
    """One chunk under way.

    Attributes:
        job: its bucket.
        number: of the chunk, counted over all buckets, the same on all ranks.
        edges: rank r sums elements ``edges[r]`` to ``edges[r + 1]`` of the bucket.
        is_last: whether it is the bucket's last.
        memory: where it lies meanwhile, from ``edges[0]`` on; None on a rank without data.
        terms: the workers' gradients of this rank's own range, in their order.
        result: their mean, once they are summed.
        borrowed: buffers to be given back.
        pushes, pulls: what is on its way here.
        sends: what is on its way from here, by peer.
    """

    job: BucketJob
    number: int
    edges: tuple[int, ...]
    is_last: bool
    memory: torch.Tensor | None = None
    terms: list[torch.Tensor] = field(default_factory=list)
    result: torch.Tensor | None = None
    borrowed: list[torch.Tensor] = field(default_factory=list)
    pushes: list[Receipt] = field(default_factory=list)
    pulls: list[Receipt] = field(default_factory=list)
    sends: list[tuple[int, Pending]] = field(default_factory=list)

    def num_elements(self, server: int) -> int:
        """Return how many elements of the chunk ``server`` sums."""
        return self.edges[server + 1] - self.edges[server]

    def part(self, server: int) -> torch.Tensor:
        """Return what ``server`` sums, where the chunk lies."""
        assert self.memory is not None
        start = self.edges[0]
        return self.memory[self.edges[server] - start : self.edges[server + 1] - start]
