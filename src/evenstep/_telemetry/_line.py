"""What a person is shown of a run while it trains: faults, news, and one line every few steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from statistics import fmean
from typing import TextIO

from .._render import percent
from ..events import (
    BalancingStopped,
    ClaimsSwitched,
    Event,
    LossNotFinite,
    MeasurementRejected,
    MemoryCapped,
    PolicyFailed,
    PolicySlow,
    RunEnded,
    RunStarted,
    SharesPlanned,
    SizesHeld,
    StepMeasured,
    StepsAccounted,
    WaitingDiagnosed,
    WorkerLost,
    WorkerUnhelpful,
)

_MOST_NAMED = 3  # causes
_FEW = 50  # steps, whose diagnosis says little
_STEALING = (
    "begin with a part of their batch and claim the rest during the step (work stealing), as long "
    "as that is faster"
)


def news(event: Event) -> str:
    """Return a line on ``event``; nothing where no person has to know it at once."""
    match event:
        case SizesHeld(step, problem):
            return f"step {step}: sizes stay as they are: {problem}"
        case WorkerUnhelpful(step, rank, with_s, without_s):
            return (
                f"step {step}: rank {rank} costs more than it brings: steps of {with_s:.3g} s with "
                f"all, {without_s:.3g} s with those that help. Start without it next time"
            )
        case BalancingStopped(step, rank, problem):
            return (
                f"step {step}: balancing is off for the rest of the run, with equal batch sizes: "
                f"{problem} on rank {rank}"
            )
        case ClaimsSwitched(step, on):
            how = _STEALING if on else "compute their planned batch, without claims"
            return f"step {step}: from now on, workers {how}"
        case SharesPlanned(step):
            return f"step {step}: from now on, {_shares(event)}"
        case MemoryCapped(step, rank, most, unit=unit):
            size = f"a size of {most} in one forward, as `Cost(max_size=...)` counts it"
            fits = f"{most} samples" if unit == "samples" else size
            return f"step {step}: rank {rank} fits at most {fits}"
    return ""


def fault(event: Event) -> str:
    """Return a sentence on a fault after which training continues; nothing for another event."""
    match event:
        case PolicyFailed(step, problem, policy):
            return (
                f"Step {step}: the policy {policy} failed, and the last good plan stays "
                f"({problem})."
            )
        case PolicySlow(step, decide_s, rest_s):
            return (
                f"Step {step}: the policy took {decide_s:.1f} s to decide, for the second time in "
                f"a row, and all ranks waited. It is called again after {rest_s:.0f} s; until then "
                "the sizes stay."
            )
        case MeasurementRejected(step, rank, problem):
            return (
                f"Step {step}: rank {rank} sent an invalid measurement, and the plan stays: "
                f"{problem}."
            )
        case LossNotFinite(step, ranks):
            whose = " and ".join(f"rank {rank}" for rank in ranks)
            return (
                f"From step {step} on losses are NaN or infinite, first on {whose}: check the "
                "batch and the loss there. Averaged gradients spread it to the parameters of all "
                "ranks for good: restart from a checkpoint of an earlier step."
            )
        case WaitingDiagnosed(step, causes=("input", *_)):
            where = f"on rank {event.ranks[0]} alone: " if event.ranks[0] >= 0 else ""
            return (
                f"Step {step}: input is the limit, {where}{event.evidence[0]}. What to do: "
                f"{event.remedy[0]}."
            )
    return ""


def happened(event: Event) -> str:
    """Return what a view of a run says of news, a fault or a lost worker; else nothing."""
    if isinstance(event, WorkerLost):
        where = f"rank {event.rank} on {event.host}"
        return f"{where} was lost after step {event.step}: {event.problem}"
    return news(event) or fault(event)


class FaultLog:
    """Warns of the policy's first failure and rest, each rank's measurements, NaN, and slow input.

    Not for each: a policy that fails once mostly fails at every step, and the events have them
    all. Goes through the logger ``evenstep``, which reaches standard error unless it is set up
    otherwise, whatever the progress line is set to.
    """

    def __init__(self) -> None:
        self._shown: set[tuple[type[Event], int | None]] = set()

    def __call__(self, event: Event) -> None:
        """Log ``event`` if it is the first of its kind; of measurements, the first of its rank."""
        kind = type(event), event.rank if isinstance(event, MeasurementRejected) else None
        if kind in self._shown or not (text := fault(event)):
            return
        self._shown.add(kind)
        words = "%s Training continues; this warning is given once."
        logging.getLogger("evenstep").warning(words, text)


def _shares(event: SharesPlanned) -> str:
    """Return who sums the gradients from now on and why, as a sentence."""
    if event.parts is None:
        return f"gradients are summed by {event.reason}"  # which begins with how
    if len(event.parts) > 16:
        number = sum(part > 0 for part in event.parts)
        return f"{number} ranks sum shares of the gradients ({event.reason})"
    return f"each rank sums its share of the gradients, {shares(event.parts)} % ({event.reason})"


def shares(parts: Sequence[int]) -> str:
    """Return parts in percent of all of them."""
    return " ".join(f"{100 * part / (sum(parts) or 1):.0f}" for part in parts)


def named(event: WaitingDiagnosed, hosts: Sequence[str]) -> str:
    """Return the causes with their ranks, such as ``rank 3@node7: input 18 %``; or nothing.

    Args:
        event: what was found.
        hosts: host name of every rank; of none where they are not known.
    """
    found = []
    for cause, rank, share in zip(event.causes, event.ranks, event.lost_share, strict=True):
        host = f"@{hosts[rank]}" if 0 <= rank < len(hosts) else ""
        whose = f"rank {rank}{host}: " if rank >= 0 else ""
        found.append(f"{whose}{cause} {percent(share)} %")
    return ", ".join(found[:_MOST_NAMED])


def waiting_news(event: WaitingDiagnosed, hosts: Sequence[str]) -> str:
    """Return a line on causes that are new, with the evidence of the first; or nothing."""
    if not event.causes:
        return ""
    evidence = event.evidence[0]
    return (
        f"step {event.step}: ranks wait for others in {percent(event.waiting_share)} % of their "
        f"time. Lost by: {named(event, hosts)}. {evidence[:1].upper()}{evidence[1:]}. What to do: "
        f"{event.remedy[0]}"
    )


PARTS = tuple(field.name.removesuffix("_s") for field in fields(StepsAccounted)[3:])


class ProgressLine:
    """Writes a progress line every ``num_steps`` measured steps, and faults as they come.

    Usage:
        evenstep step 150: batch 32 16 11 5, step 0.212 s, computing 0.194 s of it (idle 2 %), equal
        split 0.594 s: saves 64 %; time: forward 31 %, backward 58 %, communication 4 %, waiting
        2 %, optimizer 4 %, rest 1 %; lost by rank 3@node7: input 5 %

    All in one line. The figures are means over the steps since the last line. "step" is rank 0's
    time from one batch of a loop to the next: waiting for data, the exchange, the optimizer and all
    else that the loop does count. "computing" is the slowest worker's; "idle" is what the workers
    wait for it, as a part of that time in all these steps together. By the fitted times, the equal
    split would have computed for longer by some seconds, which are added to the whole step: "saves"
    compares whole steps. Where samples are assigned by cost, the line says as well what the ranks'
    speeds alone and the samples' costs alone would save. Under the policy ``Equal`` it says what
    the best split would save. What a step takes is known when the next one begins, so that the
    newest is in the next line. "time" is where the time of all workers went, in percent of all of
    it; what is below one half of a percent is left out. An evaluation or a checkpoint between two
    loops is in it too. "lost by" says who the others wait for and why, in percent of all time,
    as long as there is something to say. The last line is on the whole run, and says how to check
    what it predicts. A diagnosis is shown from 50 steps on.

    Args:
        stream: where to, such as ``sys.stderr``.
        num_steps: steps between two lines, at least 1.
    """

    def __init__(self, stream: TextIO, num_steps: int) -> None:
        self._stream = stream
        self._num_steps = num_steps
        self._before: tuple[StepMeasured, ...] = ()  # the newest step of the last line
        self._since: list[StepMeasured] = []
        self._accounts: list[StepsAccounted] = []
        self._hosts: tuple[str, ...] = ()
        self._lost_by = ""
        self._known: set[tuple[str, int]] = set()  # causes and ranks of the newest diagnosis
        self._is_equal = False
        self._is_off = False
        self._run = WholeRun()

    def __call__(self, event: Event) -> None:
        """Collect a step, or say at once what a person has to know."""
        if text := news(event):
            print(f"evenstep {text}", file=self._stream, flush=True)
        self._is_off |= isinstance(event, BalancingStopped)
        if isinstance(event, RunStarted):
            self._is_equal = event.keeps_equal
            self._hosts = event.hosts
        elif isinstance(event, WaitingDiagnosed):
            self._diagnosed(event)
        elif isinstance(event, StepsAccounted):
            self._accounts.append(event)
        elif isinstance(event, RunEnded):
            if text := self._run.described(event.num_steps, is_equal=self._is_equal):
                print(text, file=self._stream, flush=True)
        elif isinstance(event, StepMeasured):
            self._measured(event)

    def _measured(self, event: StepMeasured) -> None:
        self._run.add(event)
        self._since.append(event)
        if len(self._since) >= self._num_steps:
            off = ", balancing is off" if self._is_off else ""
            text = describe((*self._before, *self._since), is_equal=self._is_equal) + off
            time = ", ".join(spent(self._accounts))
            text += (f"; time: {time}" if time else "") + self._lost_by
            print(text, file=self._stream, flush=True)
            self._before = (event,)
            self._since.clear()
            self._accounts.clear()

    def _diagnosed(self, event: WaitingDiagnosed) -> None:
        causes = named(event, self._hosts)
        self._lost_by = f"; lost by {causes}" if causes else ""
        known, self._known = self._known, {*zip(event.causes, event.ranks, strict=True)}
        is_new, is_little = self._known != known, event.num_steps < _FEW
        if is_new and not is_little and (text := waiting_news(event, self._hosts)):
            print(f"evenstep {text}", file=self._stream, flush=True)


def whole_steps(steps: Iterable[StepMeasured]) -> Iterator[tuple[StepMeasured, float]]:
    """Yield steps with the seconds of the whole step, which the next one reports."""
    for step, after in pairwise(steps):
        if after.wall_s is not None and after.step == step.step + after.num_steps:
            yield step, after.wall_s


class WholeRun:
    """What all steps of a run took, and would have with the equal split.

    Attributes:
        last: the newest step; None before the first.
        wall_s, equal_s: seconds of the steps whose equal split is known, as they were, and as
            they would have been with it.
    """

    def __init__(self) -> None:
        self.last: StepMeasured | None = None
        self.wall_s = self.equal_s = 0.0

    def add(self, step: StepMeasured) -> None:
        """Add a step: what the one before it took as a whole is known now."""
        two = (step,) if self.last is None else (self.last, step)
        self.last = step
        for before, wall_s in whole_steps(two):
            if before.equal_split_s is not None:
                self.wall_s += before.num_steps * wall_s
                more_s = before.equal_split_s - before.makespan_s
                self.equal_s += before.num_steps * (wall_s + more_s)

    def described(self, num_steps: int, *, is_equal: bool) -> str:
        """Return the last line of a run; nothing where no step was measured.

        Args:
            num_steps: of the run.
            is_equal: whether the policy was to keep equal sizes.
        """
        if self.last is None:
            return ""
        by_cost = self.last.cost_split_s is not None
        sizes = f"batch {shortened(self.last.batch_size)} at the end"
        begin = f"evenstep ended after {num_steps} steps: {'samples by cost' if by_cost else sizes}"
        if is_equal or self.equal_s <= 0:
            return begin
        saving = 100 * (1 - self.wall_s / self.equal_s)
        verb = "save" if saving >= 0 else "cost"
        return (
            f"{begin}; predicted to {verb} {abs(saving):.0f} % of the time with equal batches. "
            f"To check, run it with `EVENSTEP=off`"
        )


def describe(steps: tuple[StepMeasured, ...], *, is_equal: bool = False) -> str:
    """Return the line for ``steps``, at least one, the newest last.

    Args:
        steps: since the last line, with the one before.
        is_equal: whether the policy is to keep equal sizes.
    """
    last, whole = steps[-1], list(whole_steps(steps))
    begin = f"evenstep step {last.step}: batch {shortened(last.batch_size)}"
    if not whole:  # as in the first step of a loop
        return f"{begin}, {_computing(steps)}"
    known = [step for step, _ in whole]
    step_s = fmean(wall_s for _, wall_s in whole)
    begin += f", step {step_s:.3g} s, {_computing(known, of_it=' of it')}"
    more = [
        instead_s - step.makespan_s
        for step in known
        if (instead_s := step.best_split_s if is_equal else step.equal_split_s) is not None
    ]
    if not more or (other_s := step_s + fmean(more)) <= 0:
        return begin
    if is_equal:
        saving = 100 * max(0.0, 1 - other_s / step_s)
        return f"{begin}, best split {other_s:.3g} s: would save {saving:.0f} %"
    saving = 100 * (1 - step_s / other_s)
    verb = "saves" if saving >= 0 else "costs"
    end = f"equal split {other_s:.3g} s: {verb} {abs(saving):.0f} %"
    return f"{begin}, {end}{_alone(known, other_s)}"


def _alone(steps: Sequence[StepMeasured], equal_s: float) -> str:
    """Return what speeds alone and lengths alone would save, where both are balanced.

    Args:
        steps: whole ones.
        equal_s: seconds of a whole step with the equal split.
    """
    found = []
    for name, field in (("speed", "speed_split_s"), ("length", "cost_split_s")):
        less = [
            step.equal_split_s - alone_s
            for step in steps
            if (alone_s := getattr(step, field)) is not None and step.equal_split_s is not None
        ]
        if less:
            found.append(f"by {name} alone {100 * max(0.0, fmean(less)) / equal_s:.0f} %")
    return f" ({', '.join(found)})" if found else ""


def spent(accounts: Sequence[StepsAccounted]) -> list[str]:
    """Return where the time of all workers went, part by part; nothing without any."""
    wall_s = sum(sum(one.wall_s) for one in accounts) or 1.0
    shares = [
        (part, 100 * sum(sum(getattr(one, f"{part}_s")) for one in accounts) / wall_s)
        for part in PARTS
    ]
    return [f"{part} {share:.0f} %" for part, share in shares if share >= 0.5]


def _computing(steps: Sequence[StepMeasured], of_it: str = "") -> str:
    compute_s = fmean(step.makespan_s for step in steps)
    idle = 100 * fmean(fmean(step.idle_s) for step in steps) / compute_s
    return f"computing {compute_s:.3g} s{of_it} (idle {idle:.0f} %)"


def shortened(batch_size: Sequence[int]) -> str:
    """Return all sizes of a small cluster, the range of a large one."""
    if len(batch_size) <= 16:
        return " ".join(map(str, batch_size))
    return f"{min(batch_size)} to {max(batch_size)} on {len(batch_size)} ranks"
