"""The schemes: as planned; a predicted first chunk, and claims on the rest in shrinking parts.

A scheme is a state machine, without a clock or a connection.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, final

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray, State, check_fields, sizes_of
from ..exceptions import invalid

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

    def local_steps(self, step_s: FloatArray) -> IntArray:
        """Return how many steps each rank takes alone until parameters are averaged, at least 1.

        Ones here: gradients are summed in every step.

        Args:
            step_s: the newest measured step time of every rank, or ones before there is any,
                ``(world_size,)``.

        Returns:
            Numbers of steps, ``(world_size,)``.
        """
        return np.ones(len(step_s), np.int64)

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


@dataclass(frozen=True, slots=True)
class Factoring:
    r"""Claims in proportion to speed, which become smaller as samples run out.

    A claim is $\max(m, \lfloor f R \, v_i / \sum_j v_j \rfloor)$ of the $R$ samples left, with
    speeds $v$. Early claims are large, so there are few; late ones are small, so all ranks end
    together. If a rank would need longer for one sample than the fastest rank for all the rest, it
    claims none.

    Right if speeds are approximately known and claims are cheap: $W$ equal ranks share out $R$
    samples in about $W (1 + \ln(f R / W)) / f$ claims. Wrong if a claim costs as much as several
    samples: raise ``smallest``.

    Args:
        share: $f$, the part of the rest that one round of claims shares out, in (0, 1]. 1 trusts
            the speeds.
        smallest: $m$, least samples of a claim, at least 1.

    Raises:
        ValueError: an argument is out of range.

    References:
        S. Hummel, J. Schmidt, R. Uma and J. Wein, *Load-sharing in heterogeneous systems via
        weighted factoring*, SPAA 1996; C. Polychronopoulos and D. Kuck, *Guided
        self-scheduling*, 1987, is $f = 1$ with equal speeds. The rank that claims none is ours.
    """

    share: float = 0.8
    smallest: int = 1

    def __post_init__(self) -> None:
        check_fields(
            self,
            share=("in (0, 1]", "0.8 keeps a fifth for surprises."),
            smallest=("an integer of at least 1", "Use 1."),
        )

    def next_claim(self, remaining: int, speeds: FloatArray, rank: int) -> int:
        """Return how many samples ``rank`` claims now; 0 if it leaves the rest to others.

        The fastest of ``speeds`` never leaves anything, so one rank always ends the step. A rank
        that claimed 0 stays out of the step: put its speed at 0 for later claims.

        Args:
            remaining: samples that are not claimed, at least 0.
            speeds: samples per second of every rank, 0 for one that stays out,
                ``(world_size,)``. Only ratios matter.
            rank: who claims.

        Raises:
            ValueError: a speed is negative, or not finite, or all are 0.
        """
        fastest, total = float(speeds.max()), float(speeds.sum())
        if not (fastest > 0 and np.isfinite(total) and speeds.min() >= 0):
            raise invalid(
                "Factoring.next_claim(speeds=...)",
                "be finite, at least 0 and not all 0",
                speeds,
                "Use ones as long as nothing was measured.",
            )
        speed = float(speeds[rank])
        if not remaining or speed * remaining < fastest:
            return 0
        return min(remaining, max(self.smallest, int(self.share * remaining * speed / total)))


@final
@dataclass(frozen=True, slots=True)
class Bsp(AbstractScheme[Planned]):
    """Bulk synchronous steps: as planned, a barrier, one gradient.

    What DDP does, and the reference for every other scheme. Right where the plan is. Wrong where
    speeds change faster than plans follow: a rank that turns slow inside a step holds up all.

    References:
        L. Valiant, *A bridging model for parallel computation*, CACM 1990.
    """

    moves_samples: ClassVar[bool] = False

    def begin(self, batch_size: IntArray) -> Planned:
        return Planned.of(batch_size)

    def turn(self, state: Planned, rank: int, speeds: FloatArray) -> Turn[Planned]:
        chunk, after = state.take(rank)
        return Turn(chunk, after)


@dataclass(frozen=True, slots=True, eq=False)
class HybridState:
    """A step under way.

    Attributes:
        first: the first chunks, and who has begun with theirs. The rest of the slots lie behind.
        next_slot: the first slot that is not claimed: the shared counter of a driver.
        num_slots: samples of the step.
        left: ranks that leave the rest to others, ``(world_size,)``.
    """

    first: Planned
    next_slot: int
    num_slots: int
    left: BoolArray


@final
@dataclass(frozen=True, slots=True)
class Hybrid(AbstractScheme[HybridState]):
    r"""Each rank begins with a part of its predicted share, then all claim what is left.

    Of its planned $b_i$ samples a rank computes $\max(1, \lfloor p \, b_i \rfloor)$ at once. The
    other samples of all ranks are pooled, and ranks that are ready claim from the pool by
    ``factoring``. If the prediction was right, this costs some claims. If it was wrong by up to a
    factor of about $1 / p$, the step makes up for it.

    The defaults were chosen for claims that cost a hundredth of the step.

    Right if load changes faster than a plan can follow, and claims are cheap compared with that.
    Wrong on steady workers: each claim is one more forward and one more request, for nothing. The
    samples of the step, and so its gradient, are the same either way.

    Args:
        first: $p$, the part of the plan that cannot be claimed, in [0, 1]. 1 is ``Bsp``.
        factoring: how large a claim is.
        least: smallest claim, as a share of the rank's part of the whole step, in [0, 1]. Smaller
            claims are mostly cost, and after larger ones ranks end too far apart.
        claim_s: seconds that a claim takes on its rank, at least 0: the request, and the fixed cost
            of a forward.

    Raises:
        ValueError: an argument is out of range.

    References:
        As for ``Factoring``. Prediction and claims together are evenstep's own.
    """

    moves_samples: ClassVar[bool] = True

    first: float = 0.4
    factoring: Factoring = field(default_factory=lambda: Factoring(0.9))
    claim_s: float = 0.0
    least: float = 0.05

    def __post_init__(self) -> None:
        check_fields(
            self,
            first=("in [0, 1]", "0.4 makes up for a rank at 0.4 times its speed."),
            claim_s=("finite and at least 0", "Measure what one takes."),
            least=("in [0, 1]", "0.05 is a twentieth."),
        )

    def first_chunk(self, batch_size: IntArray) -> IntArray:
        """Return how many samples every rank begins with, both ``(world_size,)``.

        At least 1 wherever something was planned, so that every rank is measured in every step.
        """
        part = np.floor(self.first * batch_size).astype(np.int64)
        chunk: IntArray = np.minimum(np.maximum(part, 1), batch_size)
        return chunk

    def begin(self, batch_size: IntArray) -> HybridState:
        num_slots = int(Planned.of(batch_size).edges[-1])
        first = Planned.of(self.first_chunk(np.asarray(batch_size)))
        return HybridState(first, int(first.edges[-1]), num_slots, np.zeros_like(first.begun))

    def turn(self, state: HybridState, rank: int, speeds: FloatArray) -> Turn[HybridState]:
        chunk, first = state.first.take(rank)
        state = replace(state, first=first)
        if chunk:
            return Turn(chunk, state)
        start, remaining = state.next_slot, state.num_slots - state.next_slot
        size = self.claim_size(remaining, state.num_slots, state.left, speeds, rank)
        if size:
            claim = Chunk(start, start + size, self.claim_s, is_moved=True)
            return Turn(claim, replace(state, next_slot=claim.stop))
        left = state.left.copy()
        left[rank] |= remaining > 0
        return Turn(None, replace(state, left=left))

    def claim_size(
        self, remaining: int, total: int, left: BoolArray, speeds: FloatArray, rank: int
    ) -> int:
        """Return how many samples ``rank`` claims now; 0 if it leaves the rest to others.

        Args:
            remaining: samples that are not claimed.
            total: samples of the step.
            left: ranks that leave the rest to others, ``(world_size,)``.
            speeds: samples per second, positive, likewise.
            rank: who claims.
        """
        if not remaining or left[rank]:
            return 0
        going = np.where(left, 0.0, speeds)
        size = self.factoring.next_claim(remaining, going, rank)
        least = int(self.least * total * speeds[rank] / going.sum())
        return min(remaining, max(size, least)) if size else 0
