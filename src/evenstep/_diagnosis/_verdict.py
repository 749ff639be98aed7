"""From what ranks' times cost to causes: whose, of which kind, by what evidence, or none at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from .._render import counted, number, percent, seconds
from .._types import FloatArray
from ..events import WaitingDiagnosed
from ._account import Cause, HostRates
from ._critical_path import Family, FrontierSums
from ._slow_links import LinkLoads, SlowLink, said_of, said_of_all
from ._trend import Levels, cause_of, more_than_others


class Facts(NamedTuple):
    """What a verdict rests on.

    Attributes:
        sums: of the steps that are looked at.
        rates: what processes and machines did in that time.
        links: what was carried between ranks.
        slow_links: those of them that all ranks wait for.
        exchange_us: microseconds of a step that all ranks wait together for what is exchanged,
            before and after it became longer in the run.
        levels: what each rank's computing rests at; None where there were too few steps.
        course_of: why a rank is slow, by how that develops in time.
    """

    sums: FrontierSums
    rates: HostRates
    links: LinkLoads
    slow_links: Sequence[SlowLink]
    exchange_us: tuple[float, float]
    levels: Levels | None
    course_of: Callable[[int], Cause]


_REMEDY = {
    Cause.SLOW_WORKER: "give it fewer samples, as evenstep's balancing does, or a faster device",
    Cause.THROTTLING: "look at the temperature and the clock of its device, and at its cooling and "
    "power limits; balancing follows its speed meanwhile",
    Cause.CONTENTION: "find what else runs on its machine, and move it away, or give this rank "
    "cores of its own; balancing follows its speed meanwhile",
    Cause.SLOW_BACKWARD: "look for what its backward does and the others' do not: hooks on "
    "gradients, a branch that only this rank computes, recomputed activations, or swapping",
    Cause.INPUT: "give its loader more workers, a faster disk, or data that is prepared beforehand",
    Cause.NETWORK: "check the links, reduce less often (gradient accumulation) or in lower "
    "precision, or hide it behind a larger batch; `evenstep doctor` measures the links",
    Cause.GARBAGE_COLLECTION: "call `gc.freeze()` after the first steps, and collect on all ranks "
    "in the same step: `gc.disable()`, then `gc.collect()` every thousand steps or so",
    Cause.CHECKPOINT: "save more rarely, or from a copy in a thread of its own, or on all ranks "
    "at the same time, each a part",
    Cause.LOGGING: "do it more rarely, in a thread of its own, or split over all ranks",
    Cause.LENGTHS: "assign the samples of a step to the ranks by length, as "
    "`Balancer(cost=...)` does; or group samples of similar length into a batch",
    Cause.ROTATING: "look at what changes from step to step on the ranks' machines: other "
    "processes, shared storage, or samples of one shape that differ in work",
    Cause.COMPILATION: "keep shapes the same, or mark what changes as dynamic; and have all ranks "
    "compile before the first step",
    Cause.MEMORY: "take a smaller batch or fewer loader workers there, or free memory that others "
    "use",
}
_LEAST_LONGER_US = 1000  # less is noise
_LONGER_EXCHANGE = 1.5  # times, from which it is said that an exchange has become longer
_NOTABLY = 1.1  # times, below which the part that computing takes longer is said
_QUOTA = "raise its CPU quota, or start fewer threads; meanwhile give it fewer samples"
_ALL_INPUT = "give all loaders more workers, faster storage, or data that is prepared beforehand"


def worded(cause: Cause, rank: int | None, facts: Facts) -> tuple[str, str]:
    """Return the evidence for a cause, and what to do."""
    if cause is Cause.NETWORK:
        return _of_exchange(rank, facts)
    if rank is None:
        remedy = _ALL_INPUT if cause is Cause.INPUT else _REMEDY[cause]
        return _of_all_ranks(cause, facts), remedy
    if cause in _IN_FAMILY:
        return _of_family(cause, rank, facts.sums), _REMEDY[cause]
    has_quota = cause is Cause.SLOW_WORKER and facts.rates.quota[rank] > 0.01
    return _of_computing(cause, rank, facts), _QUOTA if has_quota else _REMEDY[cause]


_IN_FAMILY = {
    Cause.INPUT: (Family.INPUT, "waiting for input takes"),
    Cause.LOGGING: (
        Family.LOOP,
        "the optimizer, evaluations and the rest of the loop take",
    ),
    Cause.CHECKPOINT: (Family.CHECKPOINT, "saving takes"),
    Cause.GARBAGE_COLLECTION: (Family.COLLECTION, "Python's garbage collector takes"),
    Cause.COMPILATION: (Family.COMPILATION, "compiling takes"),
    Cause.LENGTHS: (Family.LENGTHS, "its samples are longer, which takes"),
}
_SHAPES = {
    Cause.THROTTLING: ", and it gets slower as time goes on",
    Cause.CONTENTION: ", at times more and at times less",
}


def _a_step(us: float, sums: FrontierSums) -> str:
    return f"{seconds(us / 1e6 / max(sums.num_steps, 1.0))} a step"


def _of_family(cause: Cause, rank: int, sums: FrontierSums) -> str:
    family, what = _IN_FAMILY[cause]
    more = _a_step(float(sums.excess[rank, family]), sums)
    num_seen = int(sums.num_seen[rank, family])
    is_some = 0 < num_seen < 0.9 * sums.num_steps
    seen = f", mostly in {num_seen} of {sums.num_steps:.0f} steps" if is_some else ""
    return f"{what} {more} more than on the others{seen}"


def _of_computing(cause: Cause, rank: int, facts: Facts) -> str:
    rates, whose, than = facts.rates, "the others'", "the others"
    above, usual = facts.sums.stage_excess[rank], facts.sums.stage_usual
    if (levels := facts.levels) is not None and levels.is_hidden and levels.lasts[rank]:
        above, usual = levels.above[rank], levels.usual
        whose = than = "was usual before"
    forward, backward = 1 + above / np.maximum(usual, 1.0)
    whole = 1 + above.sum() / max(float(usual.sum()), 1.0)
    if cause is Cause.SLOW_BACKWARD:
        return (
            f"its backward takes {number(backward)} times as long as {whose}, its forward "
            f"{number(forward)} times"
        )
    text = f"it computes {number(whole)} times as long as {than}"
    if whole < _NOTABLY:
        text = f"it computes {percent(max(0.0, whole - 1))} % longer than {than}"
    if cause is Cause.MEMORY:
        faults, retries = rates.faults_per_s[rank], int(rates.retries[rank])
        parts = [f"{number(faults)} pages a second are read back from a disk"] * bool(faults)
        parts += [f"its allocator had to free memory {counted(retries, 'time')}"] * bool(retries)
        return f"{text}, while {' and '.join(parts)}"
    if cause is Cause.SLOW_WORKER and rates.quota[rank] > 0.01:
        return f"{text}; its CPU quota holds it back for {percent(rates.quota[rank])} % of the time"
    if cause is Cause.CONTENTION and rates.delay[rank] > 0.01:
        waits = percent(rates.delay[rank])
        return f"{text}{_SHAPES[cause]}; it waits for a core for {waits} % of the time"
    return text + _SHAPES.get(cause, ", throughout")


def _of_exchange(rank: int | None, facts: Facts) -> tuple[str, str]:
    sums, (before_us, after_us) = facts.sums, facts.exchange_us
    share = percent(sums.exposed / max(sums.wall, 1.0))
    text = f"all ranks wait together for the exchange, {share} % of their time"
    if after_us > max(_LONGER_EXCHANGE * before_us, _LEAST_LONGER_US):
        before, after = (seconds(us / 1e6) for us in (before_us, after_us))
        text += f"; it has become longer, {after} a step in place of {before}"
    for slow in facts.slow_links:
        if slow.rank == rank:
            of_link, remedy = said_of(slow, facts.links)
            return f"{of_link}; {text}", remedy
    return text + said_of_all(facts.links), _REMEDY[Cause.NETWORK]


def _of_all_ranks(cause: Cause, facts: Facts) -> str:
    sums, wall = facts.sums, max(facts.sums.wall, 1.0)
    if cause is Cause.INPUT and sums.fed >= float(sums.cost[:, Family.INPUT].sum()):
        return f"all ranks wait for input, {percent(sums.fed / wall)} % of their time"
    if cause is Cause.ROTATING:
        return "the slowest rank changes from step to step, for no measured reason"
    if cause is Cause.LENGTHS:
        more = _a_step(float(sums.cost[:, Family.LENGTHS].sum()), sums)
        return (
            f"computing time goes with the size of the inputs; the longest take {more} longer than "
            "usual"
        )
    family, what = _IN_FAMILY[cause]
    more = _a_step(float(sums.cost[:, family].sum()), sums)
    return f"{what} {more} more than usual on one rank or another, in different steps"


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

_OF_FAMILY = {family: cause for cause, (family, _) in _IN_FAMILY.items()}
_ANY_RANK = [Family.INPUT, Family.CHECKPOINT, Family.COLLECTION, Family.COMPILATION, Family.LENGTHS]
_UNKNOWN = [Family.COMPUTE, Family.LOOP]
_LONGER = {
    Family.COMPUTE: "computing",
    Family.INPUT: "waiting for input",
    Family.LOOP: "the optimizer, an evaluation or the rest of its loop",
}


_Found = tuple[Cause, int | None, float]  # what it is, whose, and the part of the time lost by it


def verdict(facts: Facts, step: int) -> WaitingDiagnosed:
    """Return who the others wait for, and why; ``step`` is the newest that is looked at."""
    sums = facts.sums
    world_size = len(sums.waited)
    wall = max(sums.wall, 1.0)
    waited = float(sums.waited.sum())
    waiting = waited / wall
    matched = float(np.minimum(sums.waited, sums.accounted).sum())
    explained = matched / waited if waited else 1.0
    is_known = explained >= _LEAST_EXPLAINED or waiting < _LEAST_WAITING
    found = [*_of_all(facts)]
    if is_known and sums.num_steps and world_size > 1:
        named = {one[:2] for one in found}
        found += [one for one in _of_ranks(facts) if one[:2] not in named]
    # An exchange that names no link takes its time beside any cause: a rank at fault comes first.
    found.sort(key=lambda one: -one[2] / (2 if one[:2] == (Cause.NETWORK, None) else 1))
    said = [worded(cause, rank, facts) for cause, rank, _ in found]
    return WaitingDiagnosed(
        step=step,
        num_steps=int(sums.num_steps),
        step_s=wall / world_size / max(sums.num_steps, 1.0) / 1e6,
        waiting_share=waiting,
        explained_share=explained,
        causes=tuple(str(cause) for cause, _, _ in found),
        ranks=tuple(-1 if rank is None else rank for _, rank, _ in found),
        lost_share=tuple(min(1.0, share) for _, _, share in found),
        evidence=tuple(evidence for evidence, _ in said),
        remedy=tuple(remedy for _, remedy in said),
        no_verdict="" if found else _why_not(sums, waiting, explained),
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


def _of_all(facts: Facts) -> Iterator[_Found]:
    """Yield what all ranks lose alike.

    An exchange takes its part of the time on any link. So it is named from a larger part on, or if
    it has become longer in the run by a smaller one. Links that are slow have it by name.
    """
    sums, slow, (before_us, after_us) = facts.sums, facts.slow_links, facts.exchange_us
    usual, wall = _usual_wall(sums), max(sums.wall, 1.0)
    usual_step_us = usual / len(sums.waited) / max(sums.num_steps, 1.0)
    has_grown = after_us - before_us >= _LEAST_GROWN * usual_step_us
    is_long = sums.exposed >= (_LEAST_GROWN if has_grown else _LEAST_EXPOSED) * usual
    if len(sums.waited) > 1 and is_long:
        yield from ((Cause.NETWORK, one.rank, one.hides * sums.exposed / wall) for one in slow)
        if not slow:
            yield Cause.NETWORK, None, sums.exposed / wall
    if sums.fed >= _LEAST_FED * usual:
        yield Cause.INPUT, None, sums.fed / wall


def _usual_wall(sums: FrontierSums) -> float:
    """Return the time of all ranks were there no cause at all: small ones count against this."""
    world_size = len(sums.waited)
    return max(sums.wall - world_size * float(sums.cost.sum()), 0.1 * sums.wall, 1.0)


def _of_ranks(facts: Facts) -> Iterator[_Found]:
    """Yield what one rank costs the others, and what changes from rank to rank."""
    sums, levels = facts.sums, facts.levels
    world_size = len(sums.waited)
    scale = (world_size - 1) / max(sums.wall, 1.0)
    if (accounted := float(sums.accounted.sum())) > 0:
        scale *= min(1.0, float(sums.waited.sum()) / accounted)
    usual = _usual_wall(sums) / max(sums.wall, 1.0)
    least = _LEAST_CAUSE * usual
    cost = _gathered(sums, facts.rates)
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
            by_course = facts.course_of(rank)
            if levels is not None and (family, rank) in by_level:
                by_course = cause_of(levels.slower[:, rank])
            cause = _of_compute(facts, rank, by_course)
        yield cause, rank, share
    for family in _ANY_RANK:
        if (share := float(rest[:, family].sum())) >= least:
            yield _OF_FAMILY[family], None, share
    if (share := _rotating(sums, rest)) >= usual * _by_chance(world_size):
        waiting = float(sums.waited.sum()) / max(sums.wall, 1.0)
        yield Cause.ROTATING, None, min(share, waiting)


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


def _of_compute(facts: Facts, rank: int, by_course: Cause) -> Cause:
    """Return why a rank computes longer than the others.

    By what its process and machine say; else by what takes longer and when.
    """
    sums, rates, levels = facts.sums, facts.rates, facts.levels
    faults = rates.faults_per_s
    is_short = more_than_others(faults, rank) >= max(_LEAST_FAULTS_PER_S, 0.5 * faults[rank])
    if is_short or more_than_others(rates.retries, rank) >= 1:
        return Cause.MEMORY
    if (held_by := _held_by(sums, rates, rank)) is not None:
        return held_by
    above, usual = sums.stage_excess[rank], sums.stage_usual
    if levels is not None and levels.lasts[rank]:  # without what comes and goes
        above, usual = levels.above[rank], levels.usual
    forward, backward = above / np.maximum(usual, 1.0)
    if forward < _ALONE * backward and above[1] >= _MOSTLY * above.sum():
        return Cause.SLOW_BACKWARD
    return by_course
