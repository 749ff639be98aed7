"""When claims are tried, kept and given up, on workers whose times are made up."""

import numpy as np

from evenstep import StepTimings
from evenstep._planner import Bounds, Job, Planner, Report
from evenstep._planner._claim_switch import ClaimSwitch
from evenstep.claims import Hybrid
from evenstep.events import ClaimsSwitched
from evenstep.policies import Equal

from ..torch.plans import Restless

SIZES = np.array([8, 8])


def run(switch, num_steps, *, plain, claimed, seed=0):
    """Return which steps ran with claims; each way takes what its function draws for a worker."""
    rng, used = np.random.default_rng(seed), []
    for _ in range(num_steps):
        used.append(switch.on)
        seconds = (claimed if switch.on else plain)(rng)
        switch.observe(StepTimings(SIZES, seconds, np.zeros(2)), claimed=switch.on)
    return used


def calm(rng):
    return 0.1 * rng.lognormal(0, 0.005, 2)


def bursts(rng):
    """Slow in a third of the steps, one or the other."""
    return 0.1 * np.where(rng.uniform(size=2) < 1 / 6, 2.0, 1.0)


def evened_out(seconds_more):
    """The same load, shared by both, at a price."""
    return lambda rng: np.full(2, bursts(rng).mean() + seconds_more)


def test_calm_workers_never_try():
    """Nothing is lost that claims could bring back."""
    assert not any(run(ClaimSwitch(Hybrid(), adaptive=True), 500, plain=calm, claimed=calm))


def test_claims_that_absorb_more_than_they_cost_stay():
    """Tried after 16 steps; asked again now and then."""
    used = run(
        ClaimSwitch(Hybrid(), adaptive=True), 1000, plain=bursts, claimed=evened_out(0.001), seed=1
    )

    assert used.index(True) == 16
    assert np.mean(used) > 0.75
    assert not all(used[100:])


def test_claims_that_cost_more_are_given_up_and_rarely_tried_again():
    """Within 16 steps, and after waits that double."""
    used = run(ClaimSwitch(Hybrid(), adaptive=True), 2000, plain=bursts, claimed=evened_out(0.1))

    trials = np.flatnonzero(np.diff(used, prepend=False, append=False).reshape(-1))
    begins, ends = trials[::2], trials[1::2]
    assert (ends - begins == 16).all()
    assert 64 <= begins[1] - ends[0] < 128
    assert (np.diff(begins)[1:] > 1.5 * np.diff(begins)[:-1]).all()
    assert np.mean(used) < 0.06


def test_load_that_becomes_calm_ends_them():
    """The next question after that finds them useless."""
    switch = ClaimSwitch(Hybrid(), adaptive=True)
    run(switch, 200, plain=bursts, claimed=evened_out(0.001))
    assert switch.on

    used = run(switch, 2000, plain=calm, claimed=lambda rng: calm(rng) + 0.001)

    assert not any(used[-500:])


def test_asked_for_they_are_always_on():
    """Whatever they cost."""
    assert all(run(ClaimSwitch(Hybrid(), adaptive=False), 50, plain=calm, claimed=bursts))


def test_steps_of_before_the_switch_do_not_count():
    """A device reports late: such a step ran the other way."""
    switch = ClaimSwitch(Hybrid(), adaptive=True)
    for _ in range(100):
        switch.observe(StepTimings(SIZES, np.array([1.0, 2.0]), np.zeros(2)), claimed=True)

    assert not switch.on


def test_a_worker_without_samples_has_no_speed():
    """Its time means nothing, and nobody divides by it."""
    switch = ClaimSwitch(Hybrid(), adaptive=True)
    for _ in range(16):
        timings = StepTimings(np.array([16, 0]), np.array([0.1, np.nan]), np.zeros(2))
        switch.observe(timings, claimed=False)

    assert not switch.on


def planner_of(switch, **bounds):
    """A planner of two workers in a loop that takes micro-batches."""
    job = Job(2, 64, cuts=True, bounds=Bounds(**bounds))
    return Planner(Equal(), job, warm_up_steps=0, claims=switch)


def step_of(planner, number, seconds):
    """Run one step of it as the exchange would: decide, then keep the books."""
    plan = planner.plan
    reports = [Report(number, 32, 64, each, 0.0) for each in seconds]
    outcome = planner.observe(reports, next_step=number + 1)
    planner.account(reports, plan)
    return outcome


def test_a_plan_says_what_everybody_begins_with_while_claims_are_on():
    """From the step after the books that turned them on, with an event, by a plan of its own."""
    planner, events = planner_of(ClaimSwitch(Hybrid(first=0.25), adaptive=True)), []
    assert planner.plan.first is None
    for number in range(40):
        seconds = (1.0, 2.0) if planner.plan.first is None else (1.6, 1.6)
        events += step_of(planner, number, seconds).events
    (switched,) = [event for event in events if isinstance(event, ClaimsSwitched)]

    assert switched.on
    assert planner.plan.first == (8, 8)
    assert (planner.plan.epoch, planner.plan.first_step) == (1, switched.step + 1)


def test_a_switch_is_told_of_where_new_sizes_come_with_it():
    """In the one plan that follows from both."""
    switch, events = ClaimSwitch(Hybrid(first=0.25), adaptive=True), []
    planner = Planner(Restless(), Job(2, 64, cuts=True), warm_up_steps=0, claims=switch)
    for number in range(40):
        seconds = (1.0, 2.0) if planner.plan.first is None else (1.6, 1.6)
        reports = [
            Report(number, size, 64, each, 0.0)
            for size, each in zip(planner.plan.batch_size, seconds, strict=True)
        ]
        plan = planner.plan
        events += planner.observe(reports, next_step=number + 1).events
        planner.account(reports, plan)
    switched = [event for event in events if isinstance(event, ClaimsSwitched)]

    assert [event.on for event in switched] == [True]
    assert planner.plan.epoch == 40


def test_first_chunks_are_whole_tiles():
    """Of forwards that all have one shape."""
    switch = ClaimSwitch(Hybrid(first=0.3), adaptive=False)

    assert planner_of(switch, vary="count", granularity=4).plan.first == (8, 8)


def test_claims_stay_off_where_ranks_keep_other_numbers_of_samples_together():
    """A claim is for anybody, so its tiles have to be everybody's."""
    switch = ClaimSwitch(Hybrid(), adaptive=False)

    assert planner_of(switch, granularity=(4, 8)).plan.first is None
