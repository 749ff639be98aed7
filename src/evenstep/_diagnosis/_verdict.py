"""From what ranks' times cost to causes: whose, of which kind, and whether to say anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from .._render._words import percent
from .._types import FloatArray
from ._causes import Cause, Diagnosis, FoundCause
from ._course import Shape, shape_of
from ._evidence import Facts, told
from ._frontier import Family, FrontierSums
from ._levels import Levels, more_than_others
from ._machines import HostRates

_LEAST_WAITING = 0.03  # of all ranks' time: below it, nothing is said
_LEAST_CAUSE = 0.02  # likewise, of one cause
_LEAST_LEVEL = 0.03  # likewise, of one that is seen in levels alone, and is the only one
_LEAST_EXPLAINED = 0.8  # of the waiting
_LEAST_EXPOSED = 0.12  # of all ranks' time: communication from which on the network is named
_LEAST_GROWN = 0.06  # likewise, by which it has become longer in the run
_LEAST_FED = 0.1  # likewise, waiting for input that all ranks have in common
_CHANCE = 0.075  # of a step: one standard deviation that is taken for chance
_LEAST_Z = {Family.COMPUTE: 3.0, Family.INPUT: 2.2, Family.LOOP: 2.2, Family.LENGTHS: 3.0}
_LEAST_Z_ALONE = 1.7  # as with three pauses of equal length
_LEAST_NUMBER = 8.0  # steps that count in what changes from step to step
_LEAST_HELD = 0.03  # part of the time that a quota or the want of a core has to take
_LEAST_FAULTS_PER_S = 20.0
_ALONE = 0.4  # forward over backward, by how much they are slower: below, it is the backward alone
_MOSTLY = 0.75  # of what a rank computes longer: at least so much is in the backward then

_OF_FAMILY = {
    Family.INPUT: Cause.INPUT,
    Family.LOOP: Cause.LOGGING,
    Family.CHECKPOINT: Cause.CHECKPOINT,
    Family.COLLECTION: Cause.GARBAGE_COLLECTION,
    Family.COMPILATION: Cause.COMPILATION,
    Family.LENGTHS: Cause.LENGTHS,
}
_ANY_RANK = [Family.INPUT, Family.CHECKPOINT, Family.COLLECTION, Family.COMPILATION, Family.LENGTHS]
_UNKNOWN = [Family.COMPUTE, Family.LOOP]
_LONGER = {
    Family.COMPUTE: "computing",
    Family.INPUT: "waiting for input",
    Family.LOOP: "the optimizer, an evaluation or the rest of its loop",
}


class _Found(NamedTuple):
    cause: Cause
    rank: int | None
    share: float


def verdict(
    sums: FrontierSums,
    *,
    step: int,
    rates: HostRates,
    course_of: Callable[[int], Shape],
    exchange: Callable[[], tuple[float, float]],
    levels: Levels | None,
) -> Diagnosis:
    """Return who the others wait for, and why.

    Args:
        sums: of the steps that are looked at.
        step: the newest of them.
        rates: what processes and machines did in that time.
        course_of: how a rank's slowness goes on in time.
        exchange: microseconds of a step that all ranks wait together for what is exchanged, before
            and after it became longer in the run.
        levels: what each rank's computing rests at; None where there were too few steps.
    """
    world_size = len(sums.waited)
    wall = max(sums.wall, 1.0)
    waited = float(sums.waited.sum())
    waiting = waited / wall
    matched = float(np.minimum(sums.waited, sums.accounted).sum())
    explained = matched / waited if waited else 1.0
    is_known = explained >= _LEAST_EXPLAINED or waiting < _LEAST_WAITING
    jump_us = exchange()
    found = [*_of_all(sums, wall, jump_us)]
    if is_known and sums.num_steps and world_size > 1:
        named = {(one.cause, one.rank) for one in found}
        others = _of_ranks(sums, rates, course_of, levels)
        found += [one for one in others if (one.cause, one.rank) not in named]
    found.sort(key=lambda one: -one.share)
    facts = Facts(sums, rates, jump_us, levels)
    causes = tuple(
        FoundCause(one.cause, one.rank, min(1.0, one.share), *told(one.cause, one.rank, facts))
        for one in found
    )
    return Diagnosis(
        step=step,
        num_steps=int(sums.num_steps),
        step_s=wall / world_size / max(sums.num_steps, 1.0) / 1e6,
        waiting_share=waiting,
        explained_share=explained,
        found=causes,
        no_verdict="" if causes else _why_not(sums, waiting, explained),
    )


def _why_not(sums: FrontierSums, waiting: float, explained: float) -> str:
    if not sums.num_steps:
        return "no two steps of all ranks are known yet"
    if len(sums.waited) == 1:
        return "one rank waits for no other"
    if waiting < _LEAST_WAITING:
        return f"ranks wait for others in {percent(waiting)} % of their time, which is little"
    if explained < _LEAST_EXPLAINED:
        return (
            f"ranks wait for others in {percent(waiting)} % of their time, but their own times "
            f"explain only {percent(explained)} % of that, not {percent(_LEAST_EXPLAINED)} %"
        )
    by_chance = "by small differences that change from step to step"
    by = _of_few_steps(sums) or _of_early_ranks(sums.waited) or by_chance
    return f"ranks wait for others in {percent(waiting)} % of their time, {by}"


def _of_few_steps(sums: FrontierSums) -> str:
    """Return whose few long steps are most of what is lost; nothing where they are many."""
    rank, family = divmod(int(sums.cost.argmax()), len(Family))
    cost, squared = float(sums.cost[rank, family]), float(sums.cost_squared[rank, family])
    what = _LONGER.get(Family(family))
    if what is None or cost < 0.5 * sums.cost.sum() or cost**2 >= _LEAST_NUMBER * squared:
        return ""
    number = max(1, round(cost**2 / squared))
    return (
        f"mostly for rank {rank}: {what} took longer in about {number} of {sums.num_steps:.0f} "
        "steps, which are too few to name a cause"
    )


def _of_early_ranks(waited: FloatArray) -> str:
    """Return which few ranks wait for all others; nothing where most of them wait."""
    early = np.flatnonzero(waited >= 0.5 * waited.max())
    if 2 * len(early) >= len(waited) or waited[early].sum() < _MOSTLY * waited.sum():
        return ""
    if len(early) == 1:
        return f"mostly rank {early[0]}, which is done before the others"
    return f"mostly {len(early)} of the {len(waited)} ranks, which are done before the others"


def _of_all(sums: FrontierSums, wall: float, exchange_us: tuple[float, float]) -> Iterator[_Found]:
    """Yield what all ranks lose alike.

    An exchange takes its part of the time on any link. So it is named from a larger part on, or if
    it has become longer in the run by a smaller one.
    """
    usual = _usual_wall(sums)
    usual_step_us = usual / len(sums.waited) / max(sums.num_steps, 1.0)
    has_grown = exchange_us[1] - exchange_us[0] >= _LEAST_GROWN * usual_step_us
    is_long = sums.exposed >= (_LEAST_GROWN if has_grown else _LEAST_EXPOSED) * usual
    if len(sums.waited) > 1 and is_long:
        yield _Found(Cause.NETWORK, None, sums.exposed / wall)
    if sums.fed >= _LEAST_FED * usual:
        yield _Found(Cause.INPUT, None, sums.fed / wall)


def _usual_wall(sums: FrontierSums) -> float:
    """Return the time of all ranks were there no cause at all: small ones count against this."""
    world_size = len(sums.waited)
    return max(sums.wall - world_size * float(sums.cost.sum()), 0.1 * sums.wall, 1.0)


def _of_ranks(
    sums: FrontierSums,
    rates: HostRates,
    course_of: Callable[[int], Shape],
    levels: Levels | None,
) -> Iterator[_Found]:
    """Yield what one rank costs the others, and what changes from rank to rank."""
    world_size = len(sums.waited)
    scale = (world_size - 1) / max(sums.wall, 1.0)
    if (accounted := float(sums.accounted.sum())) > 0:
        scale *= min(1.0, float(sums.waited.sum()) / accounted)
    usual = _usual_wall(sums) / max(sums.wall, 1.0)
    least = _LEAST_CAUSE * usual
    cost = _gathered(sums, rates)
    rest = scale * cost
    found = {
        (family, rank): share
        for family in Family
        for rank in range(world_size)
        if (share := scale * more_than_others(cost[:, family], rank)) >= least
        and _stands_out(sums, cost, rank, family)
    }
    by_level = {} if levels is None else _by_level(levels, scale * sums.num_steps, usual, found)
    for (family, rank), share in (found | by_level).items():
        # What is left is as on the others; a level may cost more than the steps' own charge.
        rest[rank, family] = max(0.0, rest[rank, family] - share)
        cause = _OF_FAMILY.get(family)
        if cause is None:
            shape = course_of(rank)
            if levels is not None and (family, rank) in by_level:
                shape = shape_of(levels.slower[:, rank])
            cause = _of_compute(sums, rates, rank, shape, levels)
        yield _Found(cause, rank, share)
    for family in _ANY_RANK:
        if (share := float(rest[:, family].sum())) >= least:
            yield _Found(_OF_FAMILY[family], None, share)
    if (share := _rotating(sums, rest)) >= usual * _by_chance(world_size):
        waiting = float(sums.waited.sum()) / max(sums.wall, 1.0)
        yield _Found(Cause.ROTATING, None, min(share, waiting))


def _by_level(
    levels: Levels, scale: float, usual: float, found: Collection[tuple[Family, int]]
) -> dict[tuple[Family, int], float]:
    """Return the shares of ranks whose level alone says that they compute longer.

    A small one by itself may be chance; beside another cause it is less likely to be.
    """
    shares = {(Family.COMPUTE, rank): scale * by for rank, by in enumerate(levels.lasting())}
    new = [(share, key) for key, share in shares.items() if key not in found]
    least = (_LEAST_CAUSE if found or max(new)[0] >= _LEAST_LEVEL * usual else _LEAST_LEVEL) * usual
    return {key: float(share) for share, key in new if share >= least}


def _rotating(sums: FrontierSums, rest: FloatArray) -> float:
    """Return what changes from step to step without a reason, unless few steps are all of it."""
    unknown = np.where(rest > 0, sums.cost, 0.0)[:, _UNKNOWN].sum()
    squared = np.where(rest > 0, sums.cost_squared, 0.0)[:, _UNKNOWN].sum()
    if unknown**2 < _LEAST_NUMBER * squared:
        return 0.0
    return float(rest[:, _UNKNOWN].sum())


def _by_chance(world_size: int) -> float:
    """Return what the steps of equal ranks lose by chance: the largest of some normal deviates.

    By Blom's approximation of their expected order (Statistical Estimates and Transformed
    Beta-Variables, 1958), above what is usual.
    """
    middle = max(0, world_size // 2 - 1) + 1
    expected = [
        NormalDist().inv_cdf((at - 0.375) / (world_size + 0.25)) for at in (middle, world_size)
    ]
    return _CHANCE * (expected[1] - expected[0]) * (world_size - 1) / world_size


def _gathered(sums: FrontierSums, rates: HostRates) -> FloatArray:
    """Return costs, with what a slow rank takes longer in other families in its computing.

    Where it computes slower by some factor, forward and backward alike, so it does all else. Where
    its quota or the want of a core holds it back, all of it is that.
    """
    cost = sums.cost.copy()
    slower = sums.stage_excess / np.maximum(sums.stage_usual, 1.0)
    for rank in range(len(cost)):
        by = max(0.0, float(slower[rank].min()))
        held = _held_by(sums, rates, rank)
        for family in (Family.INPUT, Family.LOOP):
            expected = by * sums.usual[family] / max(sums.excess[rank, family], 1e-9)
            moved = cost[rank, family] * (1.0 if held else min(1.0, expected))
            cost[rank, family] -= moved
            cost[rank, Family.COMPUTE] += moved
    return cost


def _stands_out(sums: FrontierSums, cost: FloatArray, rank: int, family: Family) -> bool:
    """Return whether a rank costs so much more than the others that it is no chance."""
    more = more_than_others(cost[:, family], rank)
    if more < 0.5 * cost[rank, family]:
        return False
    squared = sums.cost_squared[:, family]
    deviation = np.sqrt(squared[rank] + np.delete(squared, rank).mean())
    least = _LEAST_Z.get(family, 0.0)
    if more >= 0.9 * cost[rank, family]:  # the others have nothing of it
        least = min(least, _LEAST_Z_ALONE)
    return more >= least * float(deviation)


def _held_by(sums: FrontierSums, rates: HostRates, rank: int) -> Cause | None:
    """Return what holds a rank back by what its machine says: a quota, or others on its cores."""
    excess = float(sums.excess[rank].sum()) / max(sums.wall / len(sums.waited), 1.0)
    least = max(_LEAST_HELD, 0.3 * excess)
    if more_than_others(rates.quota, rank) >= least:
        return Cause.SLOW_WORKER
    return Cause.CONTENTION if more_than_others(rates.delay, rank) >= least else None


def _of_compute(
    sums: FrontierSums, rates: HostRates, rank: int, shape: Shape, levels: Levels | None
) -> Cause:
    """Return why a rank computes longer than the others."""
    above, usual = sums.stage_excess[rank], sums.stage_usual
    if levels is not None and levels.lasts[rank]:  # without what comes and goes
        above, usual = levels.above[rank], levels.usual
    return _by_machine(sums, rates, rank) or _by_course(above, usual, shape)


def _by_machine(sums: FrontierSums, rates: HostRates, rank: int) -> Cause | None:
    """Return why, by what its process and machine say."""
    faults = rates.faults_per_s
    is_short = more_than_others(faults, rank) >= max(_LEAST_FAULTS_PER_S, 0.5 * faults[rank])
    if is_short or more_than_others(rates.retries, rank) >= 1:
        return Cause.MEMORY
    return _held_by(sums, rates, rank)


def _by_course(excess: FloatArray, usual: FloatArray, shape: Shape) -> Cause:
    """Return why, by what takes longer and when: excess and usual are of forward and backward."""
    forward, backward = excess / np.maximum(usual, 1.0)
    if forward < _ALONE * backward and excess[1] >= _MOSTLY * excess.sum():
        return Cause.SLOW_BACKWARD
    return {Shape.GROWING: Cause.THROTTLING, Shape.SPELLS: Cause.CONTENTION}.get(
        shape, Cause.SLOW_WORKER
    )
