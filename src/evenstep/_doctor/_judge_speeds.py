"""Who is slower than those like it, who is noisy, and who is not worth keeping."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .._render._words import number, percent, seconds
from ..advice import advise
from ._checkup_facts import Checkup, Pace
from ._findings import Ailment, FoundAilment
from ._paces import run_times, usable

NOISY = 0.25
"""Half of a rank's steps are further from their median than this part of it."""
SLOW_SHARE = 0.75
"""A rank below this part of the median speed of ranks with the same device is slow."""
THROTTLED_SHARE = 0.05


def judge_speeds(checkup: Checkup) -> Iterator[FoundAilment]:
    """Yield what timed steps tell."""
    for pace in checkup.paces:
        yield from _one(checkup, pace)
    yield from _slow(checkup)
    yield from _worth(checkup)


def spread_of(pace: Pace) -> float:
    """Return the median distance of steps from the median of their size, relative to that."""
    sizes, times = np.array(pace.sizes), np.array(pace.seconds)
    ratios = np.ones(len(times))
    for size in set(pace.sizes):
        chosen = sizes == size
        ratios[chosen] = times[chosen] / np.median(times[chosen])
    return float(np.median(abs(ratios - 1)))


def _one(checkup: Checkup, pace: Pace) -> Iterator[FoundAilment]:
    name = checkup.of(pace.rank).name
    if pace.error:
        yield FoundAilment(
            Ailment.STEP_FAILED,
            (pace.rank,),
            f"{name} could not time {checkup.workload}: {pace.error}.",
            "Try it alone: `evenstep doctor` with the same `--step` on that host.",
        )
    if not pace.seconds:
        return
    if pace.throttled_share > THROTTLED_SHARE:
        yield FoundAilment(
            Ailment.QUOTA_THROTTLES,
            (pace.rank,),
            f"A CPU quota held {name} back for {percent(pace.throttled_share)} % of the time in "
            "which steps were timed.",
            "Raise the quota of its container, or give its samples to others: `Balancer` does.",
        )
    elif (spread := spread_of(pace)) > NOISY:
        yield FoundAilment(
            Ailment.SPEED_NOISY,
            (pace.rank,),
            f"Steps of {name} take {percent(spread)} % more or less than their median.",
            "Look for other processes on its cores; the speeds here are rough.",
        )


def _slow(checkup: Checkup) -> Iterator[FoundAilment]:
    """Yield ranks that are slower than others with the same device."""
    paces = [pace for pace in usable(checkup)]
    if len(paces) < 3:
        return  # of two, it is unknown which is as it should be
    speed = {pace.rank: _speed(pace) for pace in paces}
    alike: dict[tuple[str, str], list[int]] = {}
    for pace in paces:
        device = checkup.of(pace.rank).device
        alike.setdefault((device.kind, device.name), []).append(pace.rank)
    noise = {pace.rank: spread_of(pace) for pace in paces}
    for ranks in (ranks for ranks in alike.values() if len(ranks) > 2):
        usual = float(np.median([speed[rank] for rank in ranks]))
        for rank in ranks:
            if speed[rank] < (SLOW_SHARE - noise[rank]) * usual:
                yield FoundAilment(
                    Ailment.RANK_SLOW,
                    (rank,),
                    f"{checkup.of(rank).name} does {number(speed[rank])} samples/s, "
                    f"{number(usual)} is the median of {len(ranks)} ranks with the same device.",
                    "Look at its temperature, clock, power limit and neighbours; meanwhile "
                    "`Balancer` gives it fewer samples.",
                )


def _speed(pace: Pace) -> float:
    """Return samples per second at the larger of the two sizes, in the median."""
    sizes, times = np.array(pace.sizes), np.array(pace.seconds)
    return float(sizes.max() / np.median(times[sizes == sizes.max()]))


def _worth(checkup: Checkup) -> Iterator[FoundAilment]:
    if len(paces := usable(checkup)) < 2:
        return
    found = run_times(checkup)
    advice = advise(found.times, found.global_batch_size)
    for at, keep in enumerate(advice.worth_keeping):
        if not keep:
            yield FoundAilment(
                Ailment.NOT_WORTH_KEEPING,
                (paces[at].rank,),
                f"{checkup.of(paces[at].rank).name} needs longer for one sample than the others "
                f"for all {found.global_batch_size}: a step takes {seconds(advice.best.step_s)} "
                f"without it, {seconds(advice.balanced.step_s)} with it.",
                "Leave it out.",
            )
