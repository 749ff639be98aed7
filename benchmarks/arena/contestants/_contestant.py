"""What a way to train has to offer."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from benchmarks.arena._world import World


class Contestant(Protocol):
    """A frozen value that trains when it is given a world.

    Attributes:
        is_exact: whether each update is the gradient of one global batch, the same for all exact
            contestants. Then they are compared by seconds per step, in turns; the others train by
            themselves and are compared by seconds to a target.
        num_servers: ranks past the workers that only serve, 0 or 1. The last rank keeps the log.
    """

    @property
    def is_exact(self) -> bool: ...

    @property
    def num_servers(self) -> int: ...

    def train(self, world: World) -> Generator[None]:
        """Train on this rank.

        Yields once when it is ready, and then wherever all ranks stand between two updates, so
        that others can have their turn. One that cannot pause yields when ``world.duration_s`` is
        over.
        """
        ...
