"""A comparator, FlexRR: ranks that fall behind hand pieces of their rest to faster ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from evenstep.claims import AbstractScheme, Chunk, Planned, Turn

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples that a rank hands over.

    Attributes:
        taker: the rank that gets them.
        num_samples: how many, at least 1, from the end of the giver's rest.
    """

    taker: int
    num_samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """How far every rank is in a step, as far as it can be told, all ``(world_size,)``.

    Attributes:
        planned: samples of its plan.
        own: those of its plan that it has not begun, and still has.
        queued: samples that it was given and has not begun.
        num_given: pieces that it has handed over.
        is_known: whether it has computed a part of the step, or had nothing planned. Before, it
            may still be paying the fixed cost of the step, so its progress is unknown.
    """

    planned: IntArray
    own: IntArray
    queued: IntArray
    num_given: IntArray
    is_known: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class StealingState:
    """A step under way.

    Attributes:
        progress: how far every rank is.
        stop: the slot after the last that is still a rank's own, ``(world_size,)``.
        gifts: pieces that each rank was given and has not begun, oldest first.
    """

    progress: Progress
    stop: IntArray
    gifts: tuple[tuple[Chunk, ...], ...]


@final
@dataclass(frozen=True, slots=True)
class Stealing(AbstractScheme[StealingState]):
    r"""Work moves from ranks that lag to ranks that lead, piece by piece, while the step runs.

    A rank computes its plan in ``num_looks`` parts and looks at the others in between. With $q_i$
    of its $b_i$ samples before it at $v_i$ samples per second, it is behind rank $j$ if

    $$\frac{q_i}{v_i} - \frac{q_j}{v_j} \ge \beta \, \frac{b_i}{v_i},$$

    and hands over a piece from its end to the rank furthest ahead: 2.5 % of its rest. From then
    on, in this step, 5 % to each rank that would end the piece before the giver's own end, one to
    each per look, until it has caught up. Takers compute what they are given first.

    Right for a few stragglers among ranks that have time to spare: where nobody lags, nothing is
    handed over. Wrong where looking costs: a plan in 40 parts is 40 forwards, where ``Hybrid``
    takes half a dozen claims. Wrong where the samples of one rank are out of reach for the others.

    Args:
        behind: $\beta$, the share of its step by which a rank lags before it hands over, in (0, 1].
        first_piece: share of its rest that a rank hands over at first, in (0, 1].
        piece: the same after that.
        hand_over_s: seconds that a piece takes its taker before computing, at least 0.
        look_s: seconds that each part after the first takes before computing, at least 0: a
            look, and a forward's own fixed cost.
        num_looks: parts of a plan between which a rank looks at the others, at least 1.

    References:
        A. Harlap et al., *Addressing the straggler problem for iterative convergent parallel ML*
        (FlexRR), SoCC 2016: 20 %, 2.5 % and 5 % are its numbers. Ours: behind is counted in the
        time still needed, any rank may help any other, and looks come at equal parts, the first
        of them when a rank has ended its first.
    """

    moves_samples: ClassVar[bool] = True

    behind: float = 0.2
    first_piece: float = 0.025
    piece: float = 0.05
    hand_over_s: float = 0.0
    look_s: float = 0.0
    num_looks: int = 40

    def local_steps(self, step_s: FloatArray) -> IntArray:
        return np.ones(len(step_s), np.int64)

    def next_piece(self, progress: Progress, speeds: FloatArray, rank: int) -> Piece | None:
        """Return what ``rank`` hands to the rank that is furthest ahead; None if nothing.

        Args:
            progress: how far every rank is.
            speeds: samples per second, positive, ``(world_size,)``.
            rank: who looks.
        """
        own, is_first = int(progress.own[rank]), not progress.num_given[rank]
        if not own or not progress.is_known[rank]:
            return None
        needed_s = np.where(progress.is_known, (progress.own + progress.queued) / speeds, np.inf)
        taker = int(np.argmin(needed_s))
        lag_s = float(needed_s[rank] - needed_s[taker])
        if is_first and lag_s < self.behind * float(progress.planned[rank] / speeds[rank]):
            return None
        size = max(1, int((self.first_piece if is_first else self.piece) * own))
        longer_s = self.hand_over_s + size / float(speeds[taker])
        return Piece(taker, size) if longer_s < lag_s else None

    def begin(self, batch_size: IntArray) -> StealingState:
        edges = Planned.of(batch_size).edges
        sizes, none = np.diff(edges), np.zeros(len(edges) - 1, np.int64)
        progress = Progress(sizes, sizes, none, none, sizes == 0)
        return StealingState(progress, edges[1:], ((),) * len(sizes))

    def turn(self, state: StealingState, rank: int, speeds: FloatArray) -> Turn[StealingState]:
        chunk, state = self._next(_known(state, rank), rank)
        # What it computes next is no longer its to give, as with the others who look from within
        # a part of theirs: else each would seem a part behind the rest.
        state, woken = self._look(state, rank, speeds)
        return Turn(chunk, state, woken)

    def _next(self, state: StealingState, rank: int) -> tuple[Chunk | None, StealingState]:
        """Return the oldest piece that ``rank`` was given, else the next part of its own."""
        was = state.progress
        if state.gifts[rank]:
            piece, *rest = state.gifts[rank]
            now = replace(was, queued=_add(was.queued, rank, -piece.num_samples))
            return piece, replace(state, progress=now, gifts=_put(state.gifts, rank, (*rest,)))
        own, planned = int(was.own[rank]), int(was.planned[rank])
        if not own:
            return None, state
        size = min(own, -(-planned // self.num_looks))
        start, cost_s = int(state.stop[rank]) - own, self.look_s if own < planned else 0.0
        now = replace(was, own=_add(was.own, rank, -size))
        return Chunk(start, start + size, cost_s), replace(state, progress=now)

    def _look(
        self, state: StealingState, rank: int, speeds: FloatArray
    ) -> tuple[StealingState, tuple[int, ...]]:
        """Return the state after ``rank`` has looked at the others, and who got a piece."""
        takers: list[int] = []
        piece = self.next_piece(state.progress, speeds, rank)
        while piece and piece.taker not in takers:
            takers.append(piece.taker)
            state = self._handed_over(state, rank, piece)
            piece = self.next_piece(state.progress, speeds, rank)
        return state, tuple(takers)

    def _handed_over(self, state: StealingState, rank: int, piece: Piece) -> StealingState:
        was, end, size = state.progress, int(state.stop[rank]), piece.num_samples
        slots = Chunk(end - size, end, self.hand_over_s, is_moved=True)
        now = replace(
            was,
            own=_add(was.own, rank, -size),
            queued=_add(was.queued, piece.taker, size),
            num_given=_add(was.num_given, rank, 1),
        )
        gifts = _put(state.gifts, piece.taker, (*state.gifts[piece.taker], slots))
        return StealingState(now, _add(state.stop, rank, -size), gifts)


def _known(state: StealingState, rank: int) -> StealingState:
    """Return the state in which ``rank``, if it has begun before, is known to have ended a part."""
    was = state.progress
    if was.is_known[rank] or was.own[rank] == was.planned[rank]:
        return state
    is_known = was.is_known.copy()
    is_known[rank] = True
    return replace(state, progress=replace(was, is_known=is_known))


def _add(counts: IntArray, rank: int, change: int) -> IntArray:
    changed = counts.copy()
    changed[rank] += change
    return changed


def _put(
    gifts: tuple[tuple[Chunk, ...], ...], rank: int, value: tuple[Chunk, ...]
) -> tuple[tuple[Chunk, ...], ...]:
    return (*gifts[:rank], value, *gifts[rank + 1 :])
