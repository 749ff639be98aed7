"""When to probe links and to try all-reduce, what decides between them, and late plans."""

import numpy as np
import pytest

from evenstep.events import MeasurementRejected, PolicyFailed
from evenstep.network import OptimalShares, SharePlanner, exchange_s, optimal_shares
from evenstep.network._following._link_tracker import ObservedExchange, Transfers
from evenstep.network._following._share_planner import links_of_servers
from evenstep.network._following._share_trust import Probes, Trust
from evenstep.network.sim import follow_links, known_links
from evenstep.network.sim._shared_links import play_exchange

from .networks import MBIT, collocated, dedicated, followed_late, mbit, mixed, planned

OPTIMAL = OptimalShares(margin=0)


class Told:
    """A planner that is told how long exchanges took, whatever the links are."""

    def __init__(self, aggregation, links):
        self.planner = SharePlanner(OPTIMAL, aggregation)
        self.aggregation, self.links, self.step = aggregation, links, 0

    def step_of(self, factor):
        """Play an exchange that takes so many times as long as it should."""
        plan = self.planner.plan
        done = play_exchange(self.aggregation, self.links, plan.shares, plan_epoch=plan.epoch)
        done = ObservedExchange(done.plan_epoch, factor * done.exchange_s, done.transfers)
        self.planner.observe(self.step, done, next_step=self.step + 1)
        self.step += 1
        return plan


@pytest.mark.parametrize(("factor", "num_shared"), [(0.8, 4), (1.0, 4), (1.3, 3), (1.5, 2)])
def test_a_probe_is_decided_by_what_exchanges_took(factor, num_shared):
    """By the model shares gain 41 %; that they really do is measured before they stay.

    If they gain less than 15 %, they are measured once more, and if they gain nothing, they are
    not.
    """
    told = Told(collocated(), mbit(100, 100, 100, 50))
    plans = [told.step_of(1.0 if step < 2 else factor) for step in range(6)]

    shared = [plan.parts is not None for plan in plans]
    assert shared == [2 <= step < 2 + num_shared for step in range(6)]
    assert "of all-reduce, as measured" in plans[min(5, 2 + num_shared)].reason


def test_a_probe_that_promises_nothing_is_over_at_once():
    """Servers at a tenth of what workers have: by no shares is that half as fast as all-reduce."""
    told = Told(dedicated(), mbit(*[150] * 4, *[15] * 4))
    plans = [told.step_of(1.0) for _ in range(5)]

    assert [plan.parts is None for plan in plans] == [True, True, False, True, True]


@pytest.mark.parametrize(("slowest", "num_shared"), [(100, 1), (85, 1), (50, 3)])
def test_links_that_look_alike_are_probed_once(slowest, num_shared):
    """None hides another there: shares that promise no gain on them are not tried."""
    told = Told(collocated(), mbit(100, 100, 100, slowest))
    plans = [told.step_of(1.0) for _ in range(6)]

    assert sum(plan.parts is not None for plan in plans[:5]) == num_shared
    assert (plans[5].parts is None) == (num_shared == 1)


def test_links_that_look_alike_are_tried_where_all_reduce_is_slower_than_they_are():
    """Shares that take what the model says are faster than such an all-reduce."""
    told = Told(collocated(), mbit(100, 100, 100, 100))
    plans = [told.step_of(1.5 if step < 2 else 1.0) for step in range(6)]

    assert all(plan.parts is not None for plan in plans[2:])


def test_a_probe_goes_by_what_was_known_of_the_links():
    """A slow server gets little in the second one, which then costs less than half of the first."""
    aggregation, links = dedicated(servers=2), mbit(*[100] * 4, 100, 10)
    found = follow_links(SharePlanner(OPTIMAL, aggregation), [links] * 220)
    probes = [
        event.parts[4:]
        for event in planned(found)
        if event.reason.startswith("probing the links: ") and "last known" not in event.reason
    ]

    assert probes[0][0] == probes[0][1]
    assert 3 * probes[1][1] < probes[1][0]


def test_an_all_reduce_that_cannot_be_is_refused():
    """A third of what links take: it starts no probe and counts for nothing."""
    told = Told(collocated(num_bytes=2_000_000), mbit(*[200] * 4))
    for _ in range(6):  # the first probe shows the links
        told.step_of(1.0)
    planner, told, ring_s = told.planner, [], 0.12
    epoch = planner.plan.epoch
    for step in range(45):
        taken_s = 0.04 if step in (0, 36, 37, 39, 40) else ring_s
        done = ObservedExchange(planner.plan.epoch, taken_s)
        told += planner.observe(step, done, next_step=step + 1)
    refused = [event for event in told if isinstance(event, MeasurementRejected)]

    assert len(refused) == 5
    assert refused[0].problem == "an all-reduce in 0.04 s, on links that take 0.12 s"
    assert planner.plan.epoch == epoch  # all-reduce since the first probe: nothing else was begun
    assert planner.plan.predicted_s == pytest.approx(ring_s)


def test_links_that_became_faster_are_believed_from_the_fifth_all_reduce_on():
    """And for good; once only, nobody asks five again."""
    trust = Trust()
    assert [bool(trust.problem(0.4, 1.0, 10**8)) for _ in range(5)] == [True] * 4 + [False]
    assert trust.problem(0.3, 1.0, 10**8) is None
    assert trust.problem(0.2, 1.0, 10**8) is not None
    assert trust.problem(0.01, 1.0, 2**18) is None  # all of it may have been saved up


def test_all_reduce_that_is_faster_than_expected_needs_no_probe():
    """Shares were given up for it; that was right all the more. Later it would be a change."""
    probes = known()
    probes.done(1.0, changed=False)
    assert [probes.due(0.5) for _ in range(4)] == [None] * 4
    assert [bool(probes.due(0.4)) for _ in range(3)] == [False, False, True]

    probes.done(1.0, changed=False)
    assert [bool(probes.due(1.3)) for _ in range(3)] == [False, False, True]


def test_shares_that_lost_to_a_lucky_all_reduce_get_another_chance():
    """Once, after five all-reduces; within 5 % of what shares took nothing speaks for them."""
    probes = Probes()
    for plain_s, probed in ((1.04, False), (1.06, True)):
        probes.done(1.0, changed=False, shares_s=1.0)
        told = [probes.due(each) for each in (2.0, plain_s, 0.5, plain_s, plain_s, plain_s)]
        assert [bool(reason) for reason in told] == [False] * 4 + [probed, False]
    assert told[4] == "probing the links: all-reduce takes 1.06 s, and shares took 1 s"


def test_the_shares_of_servers_do_not_wait_for_what_workers_carry():
    """A worker taken for slow hides what servers could do; shares suit them all the same."""
    aggregation = dedicated(servers=3, num_chunks=None)
    links = mbit(20, 100, 100, 100, 30, 120, 120)
    servers = links_of_servers(aggregation, links)
    shares = optimal_shares(aggregation, servers)

    np.testing.assert_allclose(shares[4:], [1 / 9, 4 / 9, 4 / 9])
    assert exchange_s(aggregation, links, shares=shares) == pytest.approx(8e6 / (20 * MBIT))
    whole_s = exchange_s(aggregation, servers, shares=shares)
    assert whole_s == pytest.approx(4 * 8e6 / (270 * MBIT))


def test_the_better_exchange_of_a_probe_counts_and_the_middle_one_of_a_trial():
    """One that was slow by chance must not leave all-reduce in force for long."""
    trust = Trust()
    for seconds in (9.0, 3.0, 1.0, 2.0, 4.0):
        trust.see_shares(seconds, 1.0, plan_epoch=1)
    assert trust.best_of(2) == 2.0
    assert trust.usual_of(3) == 2.0


def test_what_all_reduce_took_stays_while_links_become_known():
    """For ten exchanges; later it is thought to change with the links."""
    trust, believed_s = Trust(), [2.0] * 11 + [4.0]
    trust.see_plain(1.0)
    for step, seconds in enumerate(believed_s):
        trust.compare_plain(seconds)
        assert trust.plain_factor * seconds == (2.0 if step == 11 else 1.0)
        trust.see_shares(1.0, 1.0, plan_epoch=1)


def test_a_failing_prediction_is_said_in_words():
    """What was predicted, what it took, and what all-reduce takes."""
    trust = Trust()
    trust.see_plain(2.0)
    trust.compare_plain(1.0)
    for _ in range(5):
        trust.see_shares(3.0, 1.5, plan_epoch=1)

    assert trust.complaint(1.0) == (
        "plain all-reduce: shares took 3 s, 2.00 times what was predicted and more than its 2 s"
    )
    assert trust.complaint(2.0) is None  # all-reduce would take 4 s on links as they are now


def test_what_all_reduce_took_does_not_stay_once_links_have_changed():
    """An exchange by the same plan takes another time: from then on the model says what changed."""
    for factor, epoch, predicted_s in ((1.1, 1, 1.0), (1.3, 1, 2.0), (0.7, 1, 2.0), (1.3, 2, 1.0)):
        trust = Trust()
        trust.see_plain(1.0)
        trust.compare_plain(1.0)
        trust.see_shares(1.0, 1.0, plan_epoch=1)
        trust.compare_plain(1.0)
        trust.see_shares(factor, 1.0, plan_epoch=epoch)
        trust.compare_plain(2.0)
        assert trust.plain_factor * 2.0 == predicted_s


def test_a_chance_is_not_given_twice_in_a_row():
    """The next probe comes when it would have come."""
    probes = Probes()
    for first in (True, False, True):
        probes.done(1.0, changed=False, shares_s=0.5)
        assert [bool(probes.due(1.0)) for _ in range(5)] == [False] * 4 + [first]


def known(costs=0.0):
    """Probes after one that no rank had to wait for, as the links were unknown."""
    probes = Probes()
    assert probes.due(1.0)
    probes.spend(costs)
    probes.done(1.0, changed=False)
    return probes


def test_probes_become_rarer_where_they_change_nothing():
    """After 50 all-reduces, 100, ... and at most 1600; 50 again once shares were in force."""
    probes, waits = Probes(), []
    assert probes.due(1.0)
    for changed in [False] * 8 + [True, False]:
        probes.done(1.0, changed=changed)
        if not changed:
            waits.append(next(i for i in range(1, 2000) if probes.due(1.0)))
    assert waits == [50, 100, 200, 400, 800, 1600, 1600, 1600, 50]


@pytest.mark.parametrize("costs", [0.5, 3.0, 30.0])
def test_probes_by_the_clock_cost_two_percent(costs):
    """Whatever they cost: before the next, all-reduces have taken fifty times that."""
    probes, spent_s, steps = known(costs), 0.0, 1
    for _ in range(5):
        steps += next(i for i in range(1, 2000) if probes.due(1.0))
        probes.spend(costs)
        probes.done(1.0, changed=False)
        spent_s += costs
        assert spent_s <= 0.02 * steps + max(0.0, costs - 4.0) + 1e-9  # only the last is owed


def test_a_change_is_probed_when_lost_time_makes_up_for_a_probe():
    """Where probes cost nothing so far, at once; then, as one cost 3 s, when 6 s are lost."""
    probes = known()
    assert [bool(probes.due(3.0)) for _ in range(3)] == [False, False, True]
    probes.spend(3.0)
    probes.done(3.0, changed=False)
    assert not any(probes.due(3.0) for _ in range(4))
    assert next(i for i in range(1, 2000) if probes.due(4.0)) in (7, 8)
    probes.spend(3.0)
    probes.done(4.0, changed=True)  # it paid for itself: nothing is owed
    probes.done(4.0, changed=False)
    assert not any(probes.due(4.0) for _ in range(4))
    assert next(i for i in range(1, 2000) if probes.due(5.0)) in (4, 5)


def test_what_is_slow_now_and_then_is_no_change():
    """Where a probe is dear and nothing has been saved yet: four slow ones of eight."""
    probes = known(costs=4.0)
    assert not any(probes.due(1.0 if step % 8 < 4 else 1.4) for step in range(60))
    assert next(i for i in range(1, 2000) if probes.due(1.5)) <= 12


def test_probes_slow_training_on_equal_links_down_by_two_percent():
    """Where exchanges by shares take 10 times all-reduce; a link that slows down is still found.

    But for what the first probe takes.
    """
    aggregation, equal = collocated(), mbit(100, 100, 100, 100)
    planner = SharePlanner(OPTIMAL, aggregation)
    seconds, plain_s = [], play_exchange(aggregation, equal, None).exchange_s
    for step in range(1520):
        links = equal if step < 1500 else mbit(100, 100, 100, 30)
        plan = planner.plan
        done = play_exchange(aggregation, links, plan.shares, plan_epoch=plan.epoch)
        if plan.parts is not None and step < 1500:
            done = ObservedExchange(plan.epoch, 10 * done.exchange_s, done.transfers)
        seconds.append(done.exchange_s)
        planner.observe(step, done, next_step=step + 1)

    assert sum(seconds[3:100]) <= 1.02 * 97 * plain_s + 20 * plain_s
    assert sum(seconds[5:1500]) <= 1.02 * 1495 * plain_s
    assert sum(second > 1.5 * plain_s for second in seconds[5:1500]) > 1  # there were probes
    assert planner.plan.parts is not None


@pytest.mark.parametrize(
    ("fast", "num_steps", "aggregation"), [(400, 110, dedicated(4, 2)), (200, 230, mixed(4, 2))]
)
def test_a_server_that_is_very_slow_costs_little_once_it_is_known(fast, num_steps, aggregation):
    """2000 times and more: no probe waits for it again and again."""
    links = [mbit(100, 100, 100, 100, fast, 0.1)] * num_steps
    found = follow_links(SharePlanner(OPTIMAL, aggregation), links, noise=0.1).exchange_s
    known_s = known_links(OPTIMAL, aggregation, links)

    assert found[50:].sum() <= 1.05 * known_s[50:].sum()


class Failing(OptimalShares):
    """Breaks whenever it is asked."""

    def update(self, aggregation, links, state):
        raise ArithmeticError("cannot decide")


def test_a_policy_that_fails_is_not_asked_in_every_step():
    """When the next probe is due, and all-reduce goes on meanwhile."""
    planner = SharePlanner(Failing(), collocated())
    found = follow_links(planner, [mbit(200, 200, 200, 50)] * 300)
    failed = [event for event in found.events if isinstance(event, PolicyFailed)]

    assert 2 <= len(failed) <= 5
    assert planner.plan.parts is None


def test_ranges_too_short_to_be_timed_end_in_all_reduce():
    """The probe shows nothing, so it does not go on for ever."""
    planner, seen = SharePlanner(OPTIMAL, collocated()), []
    nothing = Transfers(np.zeros((4, 4)), np.zeros((4, 4)), np.zeros((2, 4)))
    for step in range(200):
        plan = planner.plan
        seen.append(plan.parts is not None)
        transfers = nothing if seen[-1] else None
        planner.observe(step, ObservedExchange(plan.epoch, 0.01, transfers), next_step=step + 1)

    assert sum(seen) == 3
    assert "too small to measure" in planner.plan.reason


EQUAL, UNLIKE = mbit(100, 100, 100, 100), mbit(200, 200, 200, 50)
DELAYS = pytest.mark.parametrize("delay", [1, 2, 3, 5])


@DELAYS
def test_a_probe_of_equal_links_is_one_exchange(delay):
    """However late its result comes: until then there is all-reduce."""
    planner, is_shared = followed_late(collocated(), EQUAL, delay=delay)

    assert sum(is_shared) == 1
    assert planner.plan.parts is None
    assert "no gain" in planner.plan.reason


@DELAYS
def test_shares_that_promise_to_win_stay_until_it_is_known(delay):
    """The first exchange of a probe is by equal shares, and nothing is lost after it."""
    planner, is_shared = followed_late(collocated(), UNLIKE, delay=delay)
    first = is_shared.index(True)

    assert is_shared[first : first + delay] == [True] + [False] * (delay - 1)
    assert all(is_shared[first + delay :])
    assert planner.plan.num_exchanges is None


@DELAYS
def test_shares_that_promise_less_are_tried_once(delay):
    """Links that only look unlike should not cost more than that."""
    planner, is_shared = followed_late(collocated(), UNLIKE, delay=delay, factor=1.9)

    assert sum(is_shared) == 2
    assert planner.plan.parts is None


def test_servers_without_data_tell_of_an_exchange_when_the_next_begins():
    """So a probe of them goes on until its result is a plan."""
    _, is_shared = followed_late(dedicated(), mbit(*[100] * 4, *[400] * 4), delay=4)
    first = is_shared.index(True)

    assert all(is_shared[first : first + 4])


@DELAYS
def test_a_probe_that_cannot_be_read_ends_in_all_reduce(delay):
    """Where there is no exchange by shares any more to wait for."""
    planner, is_shared = followed_late(collocated(), UNLIKE, delay=delay, factor=float("nan"))

    assert sum(is_shared) <= delay
    assert planner.plan.parts is None
    assert planner.plan.reason == "plain all-reduce: no exchange of the probe could be read"
