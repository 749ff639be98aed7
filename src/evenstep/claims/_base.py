"""The interface of schemes, and the parts of their state machines."""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import ClassVar, Generic

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray, State
from .._valid import sizes_of

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Slots that a rank computes in one go: one forward and backward, weighted by its size.

    Attributes:
        start: first slot of the step, from 0.
        stop: the slot after the last.
        cost_s: assumed seconds of the claim itself, before the samples can be computed.
        is_moved: whether they were claimed or handed over, and are not in the rank's own plan.
    """

    start: int
    stop: int
    cost_s: float = 0.0
    is_moved: bool = False

    @property
    def num_samples(self) -> int:
        """Samples in it, at least 1."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Turn(Generic[State]):
    """What an idle rank does next.

    Attributes:
        chunk: the slots to compute; None if the rank has done its part.
        state: the state of the step from now on.
        woken: ranks that were given something in this turn, and ask again if they had ended.
    """

    chunk: Chunk | None
    state: State
    woken: tuple[int, ...] = ()


class AbstractScheme(abc.ABC, Generic[State]):
    """Says how a planned step is carried out, as a pure state machine.

    A policy plans how many samples each rank gets. A scheme decides what happens to the plan while
    the step runs. ``begin`` takes the plan. Whenever a rank is idle, ``turn`` says what it does
    next, until there is nothing left. In any order of turns, the chunks of all ranks are the slots
    of the step, each exactly once.

    A scheme is an immutable value without clock or transport. The simulator asks it when a
    simulated worker is ready; a driver can ask the same object when a real worker is. One rank, or
    a counter that all ranks share, has to hold the state.

    Attributes:
        moves_samples: whether slots may change their rank inside a step. If not, each rank's only
            turn is its plan, and a driver needs no state machine.
    """

    __slots__ = ()

    moves_samples: ClassVar[bool]

    @abc.abstractmethod
    def local_steps(self, step_s: FloatArray) -> IntArray:
        """Return how many steps each rank takes alone until parameters are averaged, at least 1.

        Args:
            step_s: the newest measured step time of every rank, or ones before there is any,
                ``(world_size,)``.

        Returns:
            Numbers of steps, ``(world_size,)``: ones if gradients are summed in every step.
        """

    @abc.abstractmethod
    def begin(self, batch_size: IntArray) -> State:
        """Return the state of a step that was planned as ``batch_size``, ``(world_size,)``."""

    @abc.abstractmethod
    def turn(self, state: State, rank: int, speeds: FloatArray) -> Turn[State]:
        """Return what the idle ``rank`` does next.

        Args:
            state: from ``begin`` or from the turn before, of any rank.
            rank: the idle rank.
            speeds: estimated samples per second of every rank, positive, ``(world_size,)``. Only
                ratios matter, unless costs are given in seconds.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """Contiguous slots for every rank, rank 0's first, and which ranks have begun.

    Attributes:
        edges: rank r's slots are ``edges[r]`` to ``edges[r + 1]``, ``(world_size + 1,)``.
        begun: ranks that took theirs, ``(world_size,)``.
    """

    edges: IntArray
    begun: BoolArray

    @classmethod
    def of(cls, batch_size: IntArray) -> Planned:
        """Return the slots of a plan that no rank has begun.

        Raises:
            ValueError: the sizes are no integers, or one is negative.
        """
        sizes = sizes_of("begin(batch_size=...)", batch_size)
        edges = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=edges[1:])
        return cls(edges, np.zeros(len(sizes), np.bool_))

    def take(self, rank: int) -> tuple[Chunk | None, Planned]:
        """Return the rank's slots (None if there are none left) and the new value."""
        if self.begun[rank]:
            return None, self
        begun = self.begun.copy()
        begun[rank] = True
        start, stop = int(self.edges[rank]), int(self.edges[rank + 1])
        return Chunk(start, stop) if stop > start else None, replace(self, begun=begun)
