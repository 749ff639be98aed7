"""A worker that costs more than it brings is named; others are not."""

import numpy as np
import pytest

from evenstep import Cluster, StepTimings
from evenstep._exchange._decisions import Decisions
from evenstep.control import Job, Planner, Report
from evenstep.control._whatif import WhatIf
from evenstep.events import StepMeasured, WorkerUnhelpful
from evenstep.policies import Auto


def shown(intercept_s, slope_s):
    """What is known after steps at three splits without noise."""
    what_if = WhatIf(len(intercept_s))
    for sizes in ([32, 32, 32], [40, 40, 16], [44, 44, 8]):
        batch_size = np.array(sizes)
        what_if.observe(StepTimings(batch_size, intercept_s + slope_s * batch_size, np.zeros(3)))
    return what_if


def test_who_needs_longer_for_one_sample_than_the_others_for_all_is_named():
    """With both times: two workers share 96 samples in 0.48 s, the third begins with 0.6 s."""
    what_if = shown(np.array([0.0, 0.0, 0.6]), np.array([0.01, 0.01, 0.01]))

    burden = what_if.burden(Cluster(3, 96))

    assert burden.rank == 2
    assert burden.without_s == pytest.approx(0.48, rel=0.01)
    assert burden.with_s == pytest.approx(0.61, rel=0.02)


@pytest.mark.parametrize("intercept_s", [0.0, 0.3])
def test_a_slow_worker_that_helps_is_not(intercept_s):
    """However slow: what it takes over, the others need not compute."""
    what_if = shown(np.array([0.0, 0.0, intercept_s]), np.array([0.01, 0.01, 0.1]))

    assert what_if.burden(Cluster(3, 96)) is None


def test_whoever_is_needed_is_not():
    """The others' memory does not hold the batch."""
    what_if = shown(np.array([0.0, 0.0, 0.6]), np.array([0.01, 0.01, 0.01]))

    assert what_if.burden(Cluster(3, 96, max_batch_size=47)) is None


def test_nobody_is_as_long_as_somebody_was_not_measured():
    """Nor in a cluster of one."""
    assert WhatIf(3).burden(Cluster(3, 96)) is None
    assert WhatIf(1).burden(Cluster(1, 96)) is None


class Ranks:
    """Takes in what is announced."""

    def announce(self, plan): ...

    def publish(self, index, through): ...

    def completed(self, step): ...

    def later(self, call):
        call()


def test_it_is_told_once_and_only_if_it_lasts():
    """A worker that is slow at one look only is not worth a word."""
    events = []
    decisions = Decisions(2, lag=0, announcer=Ranks(), emit=events.append)
    decisions.planner = Planner(Auto(), Job(2, 64))
    for step in range(301):
        sizes = decisions.planner.plan.batch_size
        fixed_s = 2.0 if step > 120 else 0.0
        for rank, size in enumerate(sizes):
            seconds = 0.01 * size + fixed_s * rank
            decisions.take(rank, step, [Report(step, size, 64, seconds, 0.0)])

    (told,) = [event for event in events if isinstance(event, WorkerUnhelpful)]
    assert (told.step, told.rank) == (200, 1)
    assert told.without_s == pytest.approx(0.64, rel=0.02)
    assert sum(isinstance(event, StepMeasured) for event in events) == 301
