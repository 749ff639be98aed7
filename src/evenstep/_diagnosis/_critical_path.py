r"""Frontier accounting: what each rank's time above the others' costs, summed over steps.

Ranks meet in each step. Between two meetings, the rank that takes longest is the *frontier*: the
others wait for it. Which own time lies between which meetings is known by where it stands in the
step; ranks' clocks are compared with nothing.

What a rank took above the others is, in each family of causes, its time less what is usual: the
lower median of all ranks; with two or three ranks the shortest, so that two slow ranks are seen.
Let $e_r \ge 0$ be the sum over families. Without any of it, a stretch would be shorter by
$\max_r e_r$. That is dealt out as if each rank had asked for a runway of length $e_r$ (Shapley's
value of the airport game; Littlechild and Owen, Management Science 20, 1973): what one rank alone
takes is its own, what $n$ take is shared by these. So a rank that hides behind another one gets its
part as well.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from .._types import FloatArray
from ._account import Phase


class Family(IntEnum):
    """What is distinguished in every step; a family's cause is found in how its time is spread."""

    COMPUTE = 0
    INPUT = 1
    LOOP = 2
    """Optimizer, evaluation and the rest."""
    CHECKPOINT = 3
    COLLECTION = 4
    COMPILATION = 5
    LENGTHS = 6
    """What a rank computed longer than others as its samples were longer."""


NUM_OWN = int(Phase.REDUCTION)  # phases of own time come first
_OF_PHASE = {
    Phase.INPUT: Family.INPUT,
    Phase.FORWARD: Family.COMPUTE,
    Phase.BACKWARD: Family.COMPUTE,
    Phase.OPTIMIZER: Family.LOOP,
    Phase.EVALUATION: Family.LOOP,
    Phase.CHECKPOINT: Family.CHECKPOINT,
    Phase.REST: Family.LOOP,
}
_LATE = [Phase.OPTIMIZER, Phase.EVALUATION, Phase.CHECKPOINT, Phase.REST]
_COMPUTE = [Phase.FORWARD, Phase.BACKWARD]
_STRETCHES = (_LATE, [Phase.INPUT], [Phase.FORWARD], [Phase.BACKWARD])  # in their order


class RankSteps(NamedTuple):
    """Steps of all ranks in microseconds, the first one only for what leads to the second.

    A row is a step, or the sum of several short ones.

    Attributes:
        spent: by phase, ``(num_steps + 1, world_size, num_phases)``.
        counts: how many steps each row is, ``(num_steps + 1,)``.
        collected: in the garbage collector, ``(num_steps + 1, world_size)``.
        compiled: compiling, likewise.
        size: of the inputs, likewise.
    """

    spent: FloatArray
    counts: FloatArray
    collected: FloatArray
    compiled: FloatArray
    size: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class FrontierSums:
    """Sums over steps, in microseconds; those of several stretches of time add up.

    Attributes:
        num_steps: how many.
        num_rows: into how many they were summed before.
        wall: of all ranks together.
        exposed: the same in meetings whose last rank had come: communication that is not hidden.
        fed: waiting for input that all ranks have in common, of all ranks together.
        waited: waiting for others, ``(world_size,)``.
        accounted: the waiting that own times make expect, likewise.
        cost: what the cluster's steps are longer by, ``(world_size, num_families)``.
        cost_squared: summed over the squares of each row's, likewise.
        excess: own time above the others', likewise; negative parts left out.
        num_seen: steps in which that is more than a twentieth of the step, likewise.
        usual: what is usual on all ranks, ``(num_families,)``.
        stage_excess: forward and backward above the others', ``(world_size, 2)``.
        stage_usual: what is usual of these, ``(2,)``.
    """

    num_steps: float
    num_rows: float
    wall: float
    exposed: float
    fed: float
    waited: FloatArray
    accounted: FloatArray
    cost: FloatArray
    cost_squared: FloatArray
    excess: FloatArray
    num_seen: FloatArray
    usual: FloatArray
    stage_excess: FloatArray
    stage_usual: FloatArray

    def __add__(self, other: FrontierSums) -> FrontierSums:
        names = [field.name for field in fields(self)]
        return FrontierSums(*[getattr(self, name) + getattr(other, name) for name in names])

    @classmethod
    def empty(cls, world_size: int) -> FrontierSums:
        """Return the sums over no step."""
        by_family = np.zeros((world_size, len(Family)))
        ranks = np.zeros(world_size)
        return cls(
            num_steps=0.0,
            num_rows=0.0,
            wall=0.0,
            exposed=0.0,
            fed=0.0,
            waited=ranks,
            accounted=ranks,
            cost=by_family,
            cost_squared=by_family,
            excess=by_family,
            num_seen=by_family,
            usual=np.zeros(len(Family)),
            stage_excess=np.zeros((world_size, 2)),
            stage_usual=np.zeros(2),
        )


def frontier(
    steps: RankSteps, us_per_size: FloatArray
) -> tuple[FrontierSums, FloatArray, FloatArray, FloatArray]:
    """Return what the ranks' times above the others' cost in these steps.

    Args:
        steps: at least two.
        us_per_size: microseconds of computing per unit of ``size``, ``(world_size,)``; 0 where a
            size explains nothing.

    Returns:
        The sums over the steps, and what develops in time, a value for each of them: own computing
        above the others', as a part of theirs, ``(num_steps, world_size)``; own forward and
        backward in microseconds a step, ``(num_steps, world_size, 2)``; and communication of a step
        that is not hidden, in microseconds, ``(num_steps,)``.
    """
    count = steps.counts[1:]
    own, direct = _without_clues(steps)
    lengths = _of_lengths(steps, own, us_per_size)
    stages = own[1:][:, :, _COMPUTE]
    of_stages = stages / np.maximum(stages.sum(axis=2, keepdims=True), 1e-9)
    stages = stages - of_stages * lengths[:, :, None]
    groups = _by_stretch(own, direct, lengths)
    met = steps.spent[:, :, NUM_OWN:]
    shortest = met.min(axis=1, keepdims=True)
    waits = met - shortest
    stretches = _between_meetings(groups, waits)
    usual = usual_of(stretches)
    above = stretches - usual[:, :, None]
    cost = dealt(above)
    total = stretches.sum(axis=-1)
    wall = steps.spent[1:].sum(axis=2)
    stage_usual = usual_of(stages[None])[0]
    stage_above = stages - stage_usual[:, None]
    of_step = cost.sum(axis=0)
    computing = stage_usual.sum(axis=1)[:, None]
    is_seen = above.sum(axis=0) > 0.05 * wall.mean(axis=1)[:, None, None]
    sums = FrontierSums(
        num_steps=float(count.sum()),
        num_rows=float(len(count)),
        wall=float(wall.sum()),
        exposed=float(shortest[1:].sum() * wall.shape[1]),
        fed=float(usual[:, :, Family.INPUT].sum() * wall.shape[1]),
        waited=waits[1:].sum(axis=(0, 2)),
        accounted=(total.max(axis=2, keepdims=True) - total).sum(axis=(0, 1)),
        cost=of_step.sum(axis=0),
        cost_squared=(of_step**2).sum(axis=0),
        excess=np.maximum(above, 0.0).sum(axis=(0, 1)),
        num_seen=np.tensordot(count, is_seen, 1),
        usual=usual.sum(axis=(0, 1)),
        stage_excess=stage_above.sum(axis=0),
        stage_usual=stage_usual.sum(axis=0),
    )
    slower = stage_above.sum(axis=2) / np.maximum(computing, 1e-9)
    exposed_us = shortest[1:].sum(axis=(1, 2)) / count
    return sums, slower, stages / count[:, None, None], exposed_us


def _without_clues(steps: RankSteps) -> tuple[FloatArray, list[FloatArray]]:
    """Return own times less what direct clues explain, and that, each by phase.

    A clue does not say in which phase it was: it is taken from those above the others' time.
    """
    own = steps.spent[:, :, :NUM_OWN].copy()
    direct = []
    for clue in (steps.collected, steps.compiled):
        if not clue.any():
            direct.append(np.zeros_like(own))
            continue
        above = np.maximum(own - usual_of(own[None])[0][:, None], 0.0)
        above = np.where(above.sum(axis=2, keepdims=True) > 0, above, own)
        part = above / np.maximum(above.sum(axis=2, keepdims=True), 1e-9)
        taken = np.minimum(clue[:, :, None] * part, own)
        own -= taken
        direct.append(taken)
    return own, direct


def _of_lengths(steps: RankSteps, own: FloatArray, us_per_size: FloatArray) -> FloatArray:
    """Return how much longer each rank computed as its samples were longer than others'.

    Longer than those of the median rank in the same step; or, where ranks have samples of different
    sizes on purpose, as faster ones have more, than this rank's own in the mean. What leaves less
    to wait for is right.
    """
    size = steps.size[1:]
    computed = own[1:][:, :, _COMPUTE].sum(axis=2)
    if not us_per_size.any():
        return np.zeros_like(computed)
    than_others = (size - usual_of(size[None, :, :, None])[0]) * us_per_size
    counts = steps.counts[1:, None]
    mean = size.sum(axis=0) / counts.sum()
    than_mean = (size - mean * counts) * us_per_size

    def left(lengths: FloatArray) -> float:
        rest = computed - lengths
        return float((rest.max(axis=1) - rest.mean(axis=1)).sum())

    return min(than_others, than_mean, key=left)


def _by_stretch(own: FloatArray, direct: list[FloatArray], lengths: FloatArray) -> FloatArray:
    """Return own times by stretch of a step and family, ``(4, num_steps, world_size, 7)``.

    What comes after the reduction of a step leads to that of the next one.
    """
    found = np.zeros((len(_STRETCHES), *lengths.shape, len(Family)))
    for at, phases in enumerate(_STRETCHES):
        rows = slice(None, -1) if at < 2 else slice(1, None)
        for phase in phases:
            found[at, :, :, _OF_PHASE[phase]] += own[rows, :, phase]
            for family, taken in zip((Family.COLLECTION, Family.COMPILATION), direct, strict=True):
                found[at, :, :, family] += taken[rows, :, phase]
    found[-1, :, :, Family.COMPUTE] -= lengths
    found[-1, :, :, Family.LENGTHS] = lengths
    return found


def _between_meetings(groups: FloatArray, waits: FloatArray) -> FloatArray:
    """Return own times between one meeting and the next, ``(3, num_steps, world_size, 7)``.

    All ranks meet in the reduction. Whether they do before it, in a mean or a plan, or in a
    collective before or after the forward, is found from whether they waited there as their own
    times would have it.
    """
    of_late = waits[:-1, :, [Phase.MEAN - NUM_OWN, Phase.PLAN - NUM_OWN]].sum(axis=2)
    of_forward = waits[1:, :, Phase.MEETING - NUM_OWN]
    late, fed, forward, backward = groups
    first = np.where(_is_met(late, of_late), late, 0.0)
    led = late - first + fed
    is_before = _misfit(led, of_forward) <= _misfit(led + forward, of_forward)
    led = np.where(is_before[:, None, None], led, led + forward)
    rest = np.where(is_before[:, None, None], forward, 0.0) + backward
    second = np.where(_is_met(led, of_forward), led, 0.0)
    return np.stack([first, second, led - second + rest])


def _misfit(own: FloatArray, waits: FloatArray) -> FloatArray:
    total = own.sum(axis=2)
    found: FloatArray = np.abs(waits - (total.max(axis=1, keepdims=True) - total)).sum(axis=1)
    return found


def _is_met(own: FloatArray, waits: FloatArray) -> FloatArray:
    """Return in which steps ranks waited for at least half of what own times make expect."""
    total = own.sum(axis=2)
    expected = (total.max(axis=1, keepdims=True) - total).sum(axis=1)
    waited = waits.sum(axis=1)
    met: FloatArray = ((waited > 0) & (waited >= 0.5 * expected))[:, None, None]
    return met


def usual_of(times: FloatArray) -> FloatArray:
    """Return what most ranks reach, over ranks, which are the third axis of four.

    The lower median; of three ranks, and of other odd numbers, the one below it, so that it is
    right with two slow ranks.
    """
    at = max(0, times.shape[2] // 2 - 1)
    median: FloatArray = np.partition(times, at, axis=2)[:, :, at]
    return median


def dealt(above: FloatArray) -> FloatArray:
    """Deal out what each stretch is longer by.

    Args:
        above: what is usual, ``(num_stretches, num_steps, world_size, num_families)``.
    """
    asked = np.maximum(above.sum(axis=3), 0.0)
    order = np.argsort(-asked, axis=2)
    falling = np.take_along_axis(asked, order, axis=2)
    layers = falling - np.pad(falling[:, :, 1:], ((0, 0), (0, 0), (0, 1)))
    each = layers / np.arange(1, asked.shape[2] + 1)
    share = np.cumsum(each[:, :, ::-1], axis=2)[:, :, ::-1]
    dealt = np.empty_like(share)
    np.put_along_axis(dealt, order, share, axis=2)
    positive = np.maximum(above, 0.0)
    whole = np.maximum(positive.sum(axis=3), 1e-9)
    cost: FloatArray = positive * (dealt / whole)[:, :, :, None]
    return cost
