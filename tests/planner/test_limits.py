"""What a worker finds not to fit bounds every later plan."""

import pytest

from evenstep._planner import Job, Planner
from evenstep.events import MeasurementRejected, MemoryCapped, SizesHeld
from evenstep.policies import Auto

from .test_planner import SECONDS_PER_SAMPLE, kinds, reports_of, run, show


def limited(planner, step, rank, limit, *, again):
    """Return a step's reports, one of which has found what fits."""
    reports = reports_of(planner.plan, step)
    seconds = 0.0 if again else reports[rank].compute_s
    reports[rank] = reports[rank]._replace(limit=limit, again=again, compute_s=seconds)
    return reports


@pytest.mark.parametrize("again", [True, False])
def test_what_a_worker_found_not_to_fit_is_a_cap(again):
    """Out of memory or probed: told once, never grown over, in plain loops by smaller batches."""
    planner = Planner(Auto(), Job(3, 96))
    run(planner, 5)
    assert planner.plan.batch_size[0] > 30

    events = show(planner, limited(planner, 5, 0, 20, again=again), next_step=6)

    assert MemoryCapped(5, 0, 20, 0) in events
    assert (MeasurementRejected in kinds(events)) == again
    assert MemoryCapped not in kinds(run(planner, 20))
    assert planner.plan.batch_size[0] == 20
    assert sum(planner.plan.batch_size) == 96


def test_a_limit_never_rises():
    """A second, larger one says nothing new."""
    planner = Planner(Auto(), Job(3, 96, cuts=True))
    show(planner, limited(planner, 0, 1, 12, again=True), next_step=1)
    show(planner, limited(planner, 1, 1, 50, again=False), next_step=2)
    run(planner, 5)

    assert planner.plan.max_forward[1] == 12


def test_limits_that_leave_no_way_are_told_and_nothing_grows():
    """Three workers of 10 samples for a global batch of 96: the plan stays, an event says it."""
    planner = Planner(Auto(), Job(3, 96))
    reports = [report._replace(limit=10) for report in reports_of(planner.plan, 0)]

    events = show(planner, reports, next_step=1)

    assert SizesHeld in kinds(events)
    assert planner.plan.batch_size == (32, 32, 32)


def test_a_guess_by_the_first_step_stays_under_the_caps_of_that_step():
    """Three quarters of the memory held 32 samples; the speeds alone would give 43."""
    planner, memory = Planner(Auto(), Job(3, 96)), {"peak_bytes": 75, "capacity_bytes": 100}
    slow = tuple(1.5 * seconds for seconds in SECONDS_PER_SAMPLE)
    events = show(planner, reports_of(planner.plan, 0, seconds=slow, **memory), next_step=1)
    caps = {event.rank: event.max_batch_size for event in events if isinstance(event, MemoryCapped)}

    assert planner.plan.epoch == 1
    assert 32 < planner.plan.batch_size[0] <= caps[0] < 43
