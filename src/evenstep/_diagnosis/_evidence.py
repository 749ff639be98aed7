"""What was measured that speaks for a cause, and what to do about it, one line each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._render._words import counted, number, percent, seconds
from ._causes import Cause
from ._frontier import Family, FrontierSums
from ._levels import Levels
from ._machines import HostRates


class Facts(NamedTuple):
    """What there is to cite: sums over steps, machines, the exchange over time, and levels."""

    sums: FrontierSums
    rates: HostRates
    exchange_us: tuple[float, float]
    levels: Levels | None


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
_LONGER = 1.5  # times, from which it is said that an exchange has become longer
_NOTABLY = 1.1  # times, below which the part that computing takes longer is said
_QUOTA = "raise its CPU quota, or start fewer threads; meanwhile give it fewer samples"
_ALL_INPUT = "give all loaders more workers, faster storage, or data that is prepared beforehand"


def told(cause: Cause, rank: int | None, facts: Facts) -> tuple[str, str]:
    """Return the evidence for a cause, and what to do."""
    if rank is None:
        remedy = _ALL_INPUT if cause is Cause.INPUT else _REMEDY[cause]
        return _of_all(cause, facts), remedy
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


def _of_all(cause: Cause, facts: Facts) -> str:
    sums, (before_us, after_us) = facts.sums, facts.exchange_us
    wall = max(sums.wall, 1.0)
    if cause is Cause.NETWORK:
        text = (
            f"all ranks wait together for the exchange, {percent(sums.exposed / wall)} % of their "
            "time"
        )
        if after_us < _LONGER * before_us:
            return text
        before, after = (seconds(us / 1e6) for us in (before_us, after_us))
        return f"{text}; it has become longer, {after} a step in place of {before}"
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
