"""What a driver asks of whatever plans its steps."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence

from .._types import IntArray, StepTimings
from ..events import (
    EstimatesRestored,
    Event,
    MeasurementRejected,
    SizesHeld,
    StepMeasured,
    WorkerUnhelpful,
)
from ..policies._base import READING_S
from ._claim_switch import ClaimSwitch
from ._learnt import Learnt
from ._plan import Outcome, Plan
from ._readings import num_together
from ._report import Report, lasted_s, timings_of


class AbstractPlanner(abc.ABC):
    """Reports of a step in, a plan and events out. It reads no clock and sends no messages.

    Attributes:
        plan: what is in force, or will be from its first step on.
        claims: says when samples of a step are up for claims; None is never.
    """

    plan: Plan
    claims: ClaimSwitch | None = None
    _put_off: Callable[..., list[Event]] | None = None  # takes `next_step` and `ask`

    @abc.abstractmethod
    def observe(self, reports: Sequence[Report], *, next_step: int, ask: bool = True) -> Outcome:
        """Return what follows from one step. All ranks wait for it.

        Args:
            reports: one from each rank, in order, all about the same step.
            next_step: the first step that can still use a new plan.
            ask: whether to ask the policy; if not, the plan stays.
        """

    def come_to(self, step: int) -> Iterable[Plan]:
        """Have ``plan`` be what is planned for ``step`` already, and yield the plans up to it.

        Only a planner that knows of steps to come has any. Called before a step is answered,
        measured or not.
        """
        return ()

    @property
    @abc.abstractmethod
    def hold(self) -> int:
        """How many more steps it is to be shown before it decides again, 1 or more."""

    @property
    def is_behind(self) -> bool:
        """Whether a step was put off that nothing was learnt from yet."""
        return self._put_off is not None

    def catch_up(self, *, next_step: int, ask: bool = True) -> Outcome:
        """Learn from the step that was put off, if one was. No rank waits for it.

        ``observe`` does this itself if need be.

        Args:
            next_step: the first step that can still use a new plan, now.
            ask: as for ``observe``.
        """
        if self._put_off is None:
            return Outcome(self.plan, ())
        learn, self._put_off = self._put_off, None
        events = learn(next_step=next_step, ask=ask)
        return Outcome(self.plan, tuple(events))

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
        return self._account(reports, plan, timings_of(reports))

    @abc.abstractmethod
    def _account(
        self, reports: Sequence[Report], plan: Plan, timings: StepTimings
    ) -> StepMeasured: ...

    @abc.abstractmethod
    def equal_plan(self, first_step: int, reason: str) -> Plan:
        """Return a plan of equal sizes, as far as what fits lets them, for good."""

    @abc.abstractmethod
    def burden(self, step: int) -> WorkerUnhelpful | None:
        """Return the worker that costs more than it brings, if one is known. No rank waits."""

    @abc.abstractmethod
    def learnt(self) -> Learnt | None:
        """Return what the steps so far have taught: arrays and plain values, not to be changed."""

    @abc.abstractmethod
    def restore(self, learnt: Learnt, former: IntArray) -> EstimatesRestored:
        """Go on from what an earlier run has learnt. Before the first step.

        Args:
            learnt: from ``learnt`` of a planner.
            former: the rank each worker had then, -1 for one that is new, ``(world_size,)``.
        """


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


def hold_after(reports: Sequence[Report]) -> int:
    """Return how many more steps are reported together, where nothing is learnt from them."""
    took_s = max(report.compute_s for report in reports)
    return num_together(READING_S, took_s, max(took_s, lasted_s(reports)))
