"""When claims are tried and given up, and what other splits would have cost."""

import numpy as np
import pytest

from evenstep import Cluster, StepTimings
from evenstep._planner import Bounds, ClaimSwitch, Job, Planner, Report
from evenstep._planner._whatif import WhatIf
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
    events = planner.observe(reports, next_step=number + 1)
    planner.account(reports, plan)
    return events


def test_a_plan_says_what_everybody_begins_with_while_claims_are_on():
    """From the step after the books that turned them on, with an event, by a plan of its own."""
    planner, events = planner_of(ClaimSwitch(Hybrid(first=0.25), adaptive=True)), []
    assert planner.plan.first is None
    for number in range(40):
        seconds = (1.0, 2.0) if planner.plan.first is None else (1.6, 1.6)
        events += step_of(planner, number, seconds)
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
        events += planner.observe(reports, next_step=number + 1)
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

    burden = what_if.burden(0, Cluster(3, 96))

    assert burden.rank == 2
    assert burden.without_s == pytest.approx(0.48, rel=0.01)
    assert burden.with_s == pytest.approx(0.61, rel=0.02)


@pytest.mark.parametrize("intercept_s", [0.0, 0.3])
def test_a_slow_worker_that_helps_is_not(intercept_s):
    """However slow: what it takes over, the others need not compute."""
    what_if = shown(np.array([0.0, 0.0, intercept_s]), np.array([0.01, 0.01, 0.1]))

    assert what_if.burden(0, Cluster(3, 96)) is None


def test_whoever_is_needed_is_not():
    """The others' memory does not hold the batch."""
    what_if = shown(np.array([0.0, 0.0, 0.6]), np.array([0.01, 0.01, 0.01]))

    assert what_if.burden(0, Cluster(3, 96, max_batch_size=47)) is None


def test_nobody_is_as_long_as_somebody_was_not_measured():
    """Nor in a cluster of one."""
    assert WhatIf(3).burden(0, Cluster(3, 96)) is None
    assert WhatIf(1).burden(0, Cluster(1, 96)) is None


def test_other_splits_follow_a_rank_that_slows_down():
    """Within eight fits, as splits to compare with are worked out that often on long runs."""
    what_if, cluster = WhatIf(2), Cluster(2, 64)
    for number in range(100):
        slope_s = np.array([0.01, 0.01 if number < 60 else 0.03])
        batch_size = np.array([32 + number % 5, 32 - number % 5])
        timings = StepTimings(batch_size, slope_s * batch_size, np.zeros(2))
        what_if.observe(timings)
        equal_s, best_s = what_if.costs(cluster, timings) or (0.0, 0.0)

    assert equal_s == pytest.approx(0.96, rel=0.02)
    assert best_s == pytest.approx(0.48, rel=0.05)


def test_what_a_worker_without_samples_took_means_nothing():
    """NaN, as nothing was measured."""
    what_if = WhatIf(3)
    shown = StepTimings(np.array([48, 48, 0]), np.array([0.002, 0.001, np.nan]), np.zeros(3))
    for _ in range(4):
        what_if.observe(shown)

    assert what_if.state["num_steps"].tolist() == [4, 4, 0]


def test_equal_workers_are_no_burden_by_the_short_last_steps_of_epochs():
    """Of a few milliseconds, one by itself says little: some take as long as a full one."""
    for seed in range(20):
        what_if, rng = WhatIf(2), np.random.default_rng(seed)
        for number in range(260):
            is_tail = number % 53 == 52
            sizes = np.full(2, 16 if is_tail else 32)
            seconds = (0.0012 + 0.00003 * sizes) * rng.lognormal(0, 0.2, 2)
            seconds += rng.exponential(0.0005, 2) if is_tail else 0
            what_if.observe(StepTimings(sizes, seconds, np.zeros(2)), is_tail=is_tail)

            assert number % 10 or what_if.burden(0, Cluster(2, 64)) is None, seed


def test_equal_workers_are_no_burden_as_noise_hides_what_samples_cost():
    """Sizes differ by less than a step's noise: what twice as many take is not known."""
    for seed in range(40):
        what_if, rng = WhatIf(2), np.random.default_rng(seed)
        for number in range(200):
            more = int(rng.integers(-3, 4))
            batch_size = np.array([32 + more, 32 - more])
            seconds = (1.2 + 0.04 * batch_size) * rng.normal(1, 0.2, 2)
            what_if.observe(StepTimings(batch_size, seconds, np.zeros(2)))

            assert number % 10 or what_if.burden(0, Cluster(2, 64)) is None, seed
