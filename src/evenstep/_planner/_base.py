"""What a driver asks of whatever plans its steps, and what follows where a part of it fails."""

from __future__ import annotations

import abc
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from statistics import fmean
from typing import Any, final

import numpy as np

from .._types import IntArray, StepTimings
from ..claims import Hybrid
from ..claims._step_claims import StepClaims
from ..events import (
    EstimatesRestored,
    Event,
    MeasurementRejected,
    Rebalanced,
    SizesHeld,
    StepMeasured,
    WorkerUnhelpful,
)
from ..policies._base import READING_S
from ._learnt import Learnt
from ._plan import Plan, Report, lasted_s, num_together, timings_of
from ._whatif import measured

_WINDOW = 16  # steps that one way is judged by
_LEAST_LOST = 0.03  # of the step: what a trial has to promise
_LEAST_GAIN = 0.02  # of the step: what claims have to be worth
_FIRST_WAIT = 64  # steps until the next trial, twice as many after each that changed nothing
_LONGEST_WAIT = 1024


class ClaimSwitch:
    r"""Tries claims where steps are lost to waiting, and keeps what was faster.

    A plan that was right has all workers end together. By how much it was not is known after every
    step: $1 - T^* / T$, $T$ the time of the slowest and
    $T^* = B / \sum_r (n_r / t_r)$ what all would have taken at the speeds they showed. Where that
    is 3 % over 16 steps, the next 16 run with claims. Their mean time against that of the 16
    before decides: it holds whatever claims cost, the requests, more and smaller forwards, samples
    fetched late. Claims stay as long as they gain 2 %, asked again by as many steps without them
    after 64, 128, ... and at most 1024 steps.

    Right for load that changes faster than a step. A trial on calm workers costs its 16 steps, and
    calm workers do not get one.

    Args:
        scheme: how claims go while they are on.
        adaptive: whether to decide; if not, they are on for good.

    Attributes:
        scheme: as given.
        on: whether the next plan is up for claims.
    """

    def __init__(self, scheme: Hybrid, *, adaptive: bool) -> None:
        self.scheme = scheme
        self.on = not adaptive
        self._adaptive = adaptive
        self._step_s: dict[bool, deque[float]] = {on: deque(maxlen=_WINDOW) for on in (False, True)}
        self._lost: deque[float] = deque(maxlen=_WINDOW)
        self._on_trial = False  # what is on now is to be compared with what was before
        self._wait, self._left = _FIRST_WAIT, 0

    def observe(self, timings: StepTimings, *, claimed: bool) -> None:
        """Take in a full step.

        Args:
            timings: of all workers. Time spent waiting for claims counts as ``data_s``.
            claimed: whether it ran with claims.
        """
        ran = timings.batch_size > 0
        if not self._adaptive or claimed != self.on or not ran.any():
            return  # or it ran before the last switch was known
        busy_s = timings.compute_s[ran] + timings.data_s[ran]
        step_s = float(busy_s.max())
        level_s = float(timings.batch_size.sum() / (timings.batch_size[ran] / busy_s).sum())
        self._step_s[claimed].append(step_s)
        self._lost.append(1 - level_s / step_s)
        self._left -= 1
        if len(self._step_s[claimed]) < _WINDOW or self._left > 0:
            return
        if self._on_trial:
            self._judge()
        elif self.on or fmean(self._lost) >= _LEAST_LOST:
            self._switch(on_trial=True)

    def marked(self, plan: Plan) -> Plan:
        """Return ``plan`` with what each rank begins with, or without as long as claims are off.

        They stay off where ranks differ in which samples keep together.
        """
        if not self.on or plan.tile is None:
            return replace(plan, first=None)
        sizes = np.array(plan.batch_size, np.int64)
        first = StepClaims(self.scheme, sizes, tile=plan.tile).first
        return replace(plan, first=tuple(first.tolist()))

    def _judge(self) -> None:
        """End a trial: stay with what is on now if it was faster, else go back."""
        with_claims, without = fmean(self._step_s[True]), fmean(self._step_s[False])
        better = with_claims <= (1 - _LEAST_GAIN) * without
        if better == self.on:
            self._wait = _FIRST_WAIT
            self._on_trial = False
        else:
            self._switch(on_trial=False)
        self._left, self._wait = self._wait, min(2 * self._wait, _LONGEST_WAIT)

    def _switch(self, *, on_trial: bool) -> None:
        self.on = not self.on
        self._on_trial = on_trial
        self._step_s[self.on].clear()
        self._lost.clear()


_NEUTRAL = {__name__.partition(".")[0], "builtins", "numpy"}
_MOST_CHARACTERS = 300  # of an exception's message: it goes into another text
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)+(\w.*)")


class UserMistake(Exception):
    """What a user gave, such as a policy, raised or broke its contract.

    Attributes:
        part: its class.
    """

    def __init__(self, problem: str, part: str) -> None:
        super().__init__(problem)
        self.part = part


@final
class blaming:  # a class: several are entered in each step, and a generator takes longer
    """Turn what is raised in the block into a mistake of ``part``, unless it is evenstep's own.

    Only calls of the part, and checks of what it returned, belong into the block.

    Raises:
        UserMistake: the part is a user's. One of evenstep's own raises as it did.
    """

    __slots__ = ("_part",)

    def __init__(self, part: Any) -> None:
        self._part = part

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not is_own(self._part):
            raise UserMistake(in_words(error), type(self._part).__name__) from error


def is_own(value: Any) -> bool:
    """Return whether a policy or a reader is evenstep's own, with all that it is made of.

    A wrapper of evenstep's around a user's policy is not: what it returns is made by both.
    """
    module = getattr(value, "__module__", "builtins")
    if module.partition(".")[0] not in _NEUTRAL:
        return False
    if isinstance(value, tuple | list):
        return all(map(is_own, value))
    if isinstance(value, dict):
        return all(map(is_own, value.values()))
    if is_dataclass(value):
        return all(is_own(getattr(value, field.name)) for field in fields(value))
    return True


def in_words(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message, not too long.

    Where the message has a traceback of Python's, as those of TensorFlow's graphs and of torch's
    loader workers, its last line stands for the exception: what went wrong in the user's code.
    """
    try:
        text = str(error).strip()
    except Exception:  # of a user's class
        text = ""
    inner = _TRACEBACK.search(text)
    if inner is not None:
        return _shortened(inner[1])
    name = type(error).__name__
    return f"{name}: {_shortened(text.splitlines()[0])}" if text else name


def _shortened(line: str) -> str:
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


class AbstractPlanner(abc.ABC):
    """Reports of a step in, a plan and events out. It reads no clock and sends no messages.

    Attributes:
        plan: what is in force, or will be from its first step on; the very same object as long as
            nothing changes.
        claims: says when samples of a step are up for claims; None is never.
    """

    plan: Plan
    claims: ClaimSwitch | None = None
    _put_off: Callable[..., list[Event]] | None = None  # takes `next_step` and `ask`

    @abc.abstractmethod
    def observe(
        self, reports: Sequence[Report], *, next_step: int, ask: bool = True
    ) -> tuple[Event, ...]:
        """Return the facts that follow from one step, in order. All ranks wait for it.

        Args:
            reports: one from each rank, in order, all about the same step.
            next_step: the first step that can still use a new plan.
            ask: whether to ask the policy; if not, the plan stays.
        """

    @property
    @abc.abstractmethod
    def hold(self) -> int:
        """How many more steps it is to be shown before it decides again, 1 or more."""

    @property
    def is_behind(self) -> bool:
        """Whether a step was put off that nothing was learnt from yet."""
        return self._put_off is not None

    def catch_up(self, *, next_step: int, ask: bool = True) -> tuple[Event, ...]:
        """Learn from the step that was put off, if one was. No rank waits for it.

        ``observe`` does this itself if need be.

        Args:
            next_step: the first step that can still use a new plan, now.
            ask: as for ``observe``.
        """
        if self._put_off is None:
            return ()
        learn, self._put_off = self._put_off, None
        return tuple(learn(next_step=next_step, ask=ask))

    def account(self, reports: Sequence[Report], plan: Plan) -> StepMeasured | None:
        """Return what a step cost, and would have cost otherwise. No rank waits for it.

        Args:
            reports: one from each rank, in order, all about the same step.
            plan: the one it ran under.

        Returns:
            The fact, or None if a report cannot be.
        """
        if any(report.problem() for report in reports):
            return None
        timings = timings_of(reports)
        return measured(reports, plan, timings, self._otherwise(reports, plan, timings))

    def _otherwise(
        self, reports: Sequence[Report], plan: Plan, timings: StepTimings
    ) -> Mapping[str, float]:
        """Return what other splits of a step would have cost, by field of ``StepMeasured``."""
        return {}

    def _follow(self, plan: Plan) -> list[Event]:
        """Have a plan take the place of the one before, and return that fact."""
        self.plan = plan
        most = None if plan.costs else plan.max_forward
        return [Rebalanced(plan.first_step, plan.epoch, plan.batch_size, plan.reason, most)]

    def equal_plan(self, first_step: int, reason: str) -> Plan:
        """Return a plan of equal sizes, as far as what fits lets them, for good.

        This one keeps the sizes of before.
        """
        epoch = self.plan.epoch + 1
        return replace(self.plan, epoch=epoch, first_step=first_step, first=None, reason=reason)

    def burden(self, step: int) -> WorkerUnhelpful | None:
        """Return the worker that costs more than it brings, if one is known. No rank waits."""
        return None

    def learnt(self) -> Learnt | None:
        """Return what the steps so far have taught: arrays and plain values, not to be changed."""
        return None

    def restore(self, learnt: Learnt, former: IntArray) -> EstimatesRestored:
        """Continue from what an earlier run has learnt. Called before the first step.

        Args:
            learnt: from ``learnt`` of a planner.
            former: the rank each worker had then, -1 for one that is new, ``(world_size,)``.
        """
        return EstimatesRestored(tuple((former >= 0).tolist()), "anew", self.plan.batch_size)


def rejected(reports: Sequence[Report]) -> list[Event]:
    """Return what cannot be planned by, by name; nothing where all can."""
    bad = [(rank, report.problem()) for rank, report in enumerate(reports)]
    step = reports[0].step
    return [MeasurementRejected(step, rank, problem) for rank, problem in bad if problem]


def held(reports: Sequence[Report], *, also: str = "") -> list[Event]:
    """Return that sizes stay, where a report asks for it.

    Args:
        reports: of a step.
        also: words on what follows.
    """
    asking = [rank for rank, report in enumerate(reports) if report.holds]
    if not asking:
        return []
    problem = f"torch might run the model of rank {asking[0]} uncompiled at another size{also}"
    return [SizesHeld(reports[0].step, problem)]


_REASON = "equal for the rest of the run: balancing is off, as something failed"


@final
class EqualSizes(AbstractPlanner):
    """Plans equal sizes for the rest of a run, in the place of the planner that failed.

    Of the planner that failed it takes the plan and what fits, and nothing else: what that one has
    learnt may be half changed. So it has learnt nothing, and a run that continues from its
    checkpoint begins anew.

    Args:
        planner: the one that failed.
        first_step: first step that can still use a new plan.

    Attributes:
        plan: what is in force from ``first_step`` on. The sizes of before, should even equal ones
            fail.
    """

    hold = 1

    def __init__(self, planner: AbstractPlanner, first_step: int) -> None:
        try:
            self.plan = planner.equal_plan(first_step, _REASON)
        except Exception:  # what failed may be what that needs
            self.plan = AbstractPlanner.equal_plan(planner, first_step, _REASON)

    def observe(self, reports: Sequence[Report], *, next_step: int, ask: bool = True) -> tuple[()]:
        """Return nothing: nothing follows from a step any more."""
        took_s = max(report.compute_s for report in reports)
        self.hold = num_together(READING_S, took_s, max(took_s, lasted_s(reports)))
        return ()
