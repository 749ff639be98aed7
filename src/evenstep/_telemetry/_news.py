"""What a person has to know at once, a sentence for each event."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .._render._words import percent
from ..events import (
    BalancingStopped,
    ClaimsSwitched,
    Event,
    LossNotFinite,
    MeasurementRejected,
    MemoryCapped,
    PolicyFailed,
    PolicySlow,
    SharesPlanned,
    SizesHeld,
    WaitingDiagnosed,
    WorkerUnhelpful,
)

_MOST_NAMED = 3  # causes
_NEWS: dict[type[Event], str] = {
    SizesHeld: "step {0.step}: sizes stay as they are: {0.problem}",
    WorkerUnhelpful: "step {0.step}: rank {0.rank} costs more than it brings: steps of "
    "{0.with_s:.3g} s with all, {0.without_s:.3g} s with those that help. Start without it next "
    "time",
    BalancingStopped: "step {0.step}: balancing is off for the rest of the run, with equal batch "
    "sizes: {0.problem} on rank {0.rank}",
}
_FITS = {
    "samples": "{} samples",
    "size": "a size of {} in one forward, as `Cost(max_size=...)` counts it",
}
_CLAIMS = {
    True: "begin with a part of their batch and claim the rest during the step (work stealing), as "
    "long as that is faster",
    False: "compute their planned batch, without claims",
}
_FAULTS: dict[type[Event], str] = {
    PolicyFailed: "Step {0.step}: the policy {0.policy} failed, and the last good plan stays "
    "({0.problem}).",
    PolicySlow: "Step {0.step}: the policy took {0.decide_s:.1f} s to decide, for the second time "
    "in a row, and all ranks waited. It is called again after {0.rest_s:.0f} s; until then the "
    "sizes stay.",
    MeasurementRejected: "Step {0.step}: rank {0.rank} sent an invalid measurement, and the plan "
    "stays: {0.problem}.",
    LossNotFinite: "From step {0.step} on losses are NaN or infinite, first on {whose}: check the "
    "batch and the loss there. Averaged gradients spread it to the parameters of all ranks for "
    "good: restart from a checkpoint of an earlier step.",
    WaitingDiagnosed: "Step {0.step}: input is the limit, {input}.",
}


def news(event: Event) -> str:
    """Return a line on ``event``; nothing where no person has to know it at once."""
    match event:
        case ClaimsSwitched(step=step, on=on):
            return f"step {step}: from now on, workers {_CLAIMS[on]}"
        case SharesPlanned(step=step):
            return f"step {step}: from now on, {_shares(event)}"
        case MemoryCapped(step, rank, most, unit=unit):
            what = _FITS.get(unit, "{}, in a unit of another version").format(most)
            return f"step {step}: rank {rank} fits at most {what}"
        case _:
            return _NEWS.get(type(event), "").format(event)


def fault(event: Event) -> str:
    """Return a sentence on a fault that training goes on after; nothing for another event."""
    ranks = event.ranks if isinstance(event, LossNotFinite) else ()
    whose = " and ".join(f"rank {rank}" for rank in ranks)
    fed = _input(event) if isinstance(event, WaitingDiagnosed) else ""
    if isinstance(event, WaitingDiagnosed) and not fed:
        return ""
    return _FAULTS.get(type(event), "").format(event, whose=whose, input=fed)


class FaultLog:
    """Warns of the policy's first failure and rest, each rank's measurements, NaN, and slow input.

    Not for each: a policy that fails once mostly fails at every step, and the events have them
    all. Goes through the logger ``evenstep``, which reaches standard error unless it is set up
    otherwise, whatever the progress line is set to.
    """

    def __init__(self) -> None:
        self._told: set[tuple[type[Event], int | None]] = set()

    def __call__(self, event: Event) -> None:
        """Log ``event`` if it is the first of its kind; of measurements, the first of its rank."""
        kind = type(event), event.rank if isinstance(event, MeasurementRejected) else None
        if kind in self._told or not (text := fault(event)):
            return
        self._told.add(kind)
        words = "%s Training continues; this warning is given once."
        logging.getLogger("evenstep").warning(words, text)


def _input(event: WaitingDiagnosed) -> str:
    """Return what is said of input where it is what costs most; nothing otherwise."""
    if event.causes[:1] != ("input",):
        return ""
    where = f"on rank {event.ranks[0]} alone: " if event.ranks[0] >= 0 else ""
    return f"{where}{event.evidence[0]}. What to do: {event.remedy[0]}"


def _shares(event: SharesPlanned) -> str:
    """Return who sums the gradients from now on and why, as a sentence."""
    if event.parts is None:
        return f"gradients are summed by {event.reason}"  # which begins with how
    whole = sum(event.parts) or 1
    shares = [f"{100 * part / whole:.0f}" for part in event.parts]
    if len(shares) > 16:
        number = sum(part > 0 for part in event.parts)
        return f"{number} ranks sum shares of the gradients ({event.reason})"
    return f"each rank sums its share of the gradients, {' '.join(shares)} % ({event.reason})"


def named(event: WaitingDiagnosed, hosts: Sequence[str]) -> str:
    """Return the causes with their ranks, such as ``rank 3@node7: input 18 %``; or nothing.

    Args:
        event: what was found.
        hosts: host name of every rank; of none where they are not known.
    """
    found = zip(event.causes, event.ranks, event.lost_share, strict=True)
    return ", ".join(
        f"{_whose(rank, hosts)}{cause} {percent(share)} %"
        for cause, rank, share in list(found)[:_MOST_NAMED]
    )


def waiting_news(event: WaitingDiagnosed, hosts: Sequence[str]) -> str:
    """Return a line on causes that are new, with the evidence of the first; or nothing."""
    if not event.causes:
        return ""
    return (
        f"step {event.step}: ranks wait for others in {percent(event.waiting_share)} % of their "
        f"time. Lost by: {named(event, hosts)}. {_first_up(event.evidence[0])}. What to do: "
        f"{event.remedy[0]}"
    )


def _whose(rank: int, hosts: Sequence[str]) -> str:
    if rank < 0:
        return ""
    return f"rank {rank}@{hosts[rank]}: " if rank < len(hosts) else f"rank {rank}: "


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]
