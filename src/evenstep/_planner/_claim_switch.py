"""When a step's samples are up for claims, and when they are not."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import fmean

import numpy as np

from .._types import StepTimings
from ..claims import Hybrid
from ..claims._step_claims import StepClaims
from ._plan import Plan

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
        first = StepClaims.begin(self.scheme, sizes, tile=plan.tile).first
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
