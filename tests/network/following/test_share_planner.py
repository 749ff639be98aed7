"""Shares follow links, stay where nothing changes, and give way to all-reduce where they lose."""

import json

import numpy as np
import pytest

from evenstep.events import ExchangeMeasured, LinksMeasured, to_record
from evenstep.network import Links, OptimalShares, ProportionalShares, SharePlanner
from evenstep.network._following._link_tracker import ObservedExchange, Transfers
from evenstep.network._plans._duration import ring_s
from evenstep.network._plans._share_policies import AbstractSharePolicy, ShareDecision
from evenstep.network.sim import follow_links, known_links
from evenstep.network.sim._shared_links import play_exchange

from ..._tiers import slow_but
from .networks import collocated, dedicated, equal_s, mbit, planned, redrawn

UNLIKE = (200, 200, 200, 50)
OPTIMAL = OptimalShares(margin=0)


BOTH = pytest.mark.parametrize(
    "aggregation", [collocated(), dedicated()], ids=["collocated", "dedicated"]
)


@pytest.mark.slow
@pytest.mark.parametrize(("aggregation", "part"), [(collocated(), 0.85), (dedicated(), 0.8)])
def test_redrawn_links_are_followed(aggregation, part):
    """That much of what the plan that knows the links gains over equal shares, in the mean.

    From the second period on: the first begins with measuring. Of servers without data, a link
    that had little to do is believed to be faster by and by.
    """
    gained, possible = 0.0, 0.0
    for seed in range(3):
        links = redrawn(aggregation.world_size, seed=seed, num_periods=5)
        known_s, equal = known_links(OPTIMAL, aggregation, links), equal_s(aggregation, links)
        found = follow_links(SharePlanner(OPTIMAL, aggregation), links, noise=0.15, seed=seed)
        gained += (equal - found.exchange_s)[20:].sum()
        possible += (equal - known_s)[20:].sum()

    assert possible > 0
    assert gained >= part * possible


@BOTH
def test_the_best_shares_are_no_slower_than_the_papers_rule(aggregation):
    """Which follows the very same measurements."""
    for seed in range(2):
        links = redrawn(aggregation.world_size, seed=seed, num_periods=2)
        best, rule = (
            follow_links(
                SharePlanner(policy, aggregation), links, noise=0.1, seed=seed
            ).exchange_s.sum()
            for policy in (OPTIMAL, ProportionalShares())
        )
        assert best <= 1.01 * rule


@pytest.mark.parametrize("rank", range(4))
def test_a_change_is_followed_within_ten_steps(rank):
    """To within 6 % of the best there is."""
    aggregation = collocated()
    rates = np.array([155.0, 110, 80, 60])
    before = mbit(*rates)
    rates[rank] /= 3
    after = mbit(*rates)
    found = follow_links(
        SharePlanner(OPTIMAL, aggregation), [before] * 20 + [after] * 11, noise=0.1
    )
    best_s = known_links(OPTIMAL, aggregation, [after])[0]

    assert found.exchange_s[20] > 1.2 * best_s or rank == 3  # which had no share before
    assert found.exchange_s[30] <= 1.06 * best_s


@pytest.mark.parametrize("noise", slow_but([0.2], [0.1, 0.2, 0.3]))
def test_steady_links_have_steady_shares(noise):
    """After ten steps, a change in 20 exchanges at most but for looks, and nearly the best time."""
    aggregation, links = collocated(), [mbit(*UNLIKE)] * 100
    found = follow_links(SharePlanner(OptimalShares(), aggregation), links, noise=noise, seed=3)
    late = [event for event in planned(found) if event.step > 10]
    looks = [event for event in late if event.reason.startswith("probing")]
    best_s = known_links(OPTIMAL, aggregation, links)

    assert len(looks) in (3, 4)
    assert len(late) - 2 * len(looks) <= 5
    assert found.exchange_s[10:].mean() <= 1.05 * best_s.mean()


def test_equal_links_use_all_reduce_and_look_seldom():
    """One exchange by shares, then after 50 steps, 100, ...: what that can cost is little."""
    aggregation, links = collocated(), [mbit(100, 100, 100, 100)] * 250
    found = follow_links(SharePlanner(OPTIMAL, aggregation), links, noise=0.1)
    by_shares = [step for step, plan in enumerate(found.plans) if plan.parts is not None]

    assert by_shares == [2, 53, 154]
    assert "of all-reduce, as measured, no gain of 15%" in planned(found)[1].reason


def test_shares_come_back_when_a_link_slows_down():
    """All-reduce takes longer, three times in a row: that is worth a look."""
    aggregation = collocated()
    links = [mbit(200, 200, 200, 200)] * 30 + [mbit(*UNLIKE)] * 10
    found = follow_links(SharePlanner(OPTIMAL, aggregation), links)

    assert found.plans[29].parts is None
    assert found.plans[36].parts is not None
    assert found.plans[36].shares[3] < 0.02
    assert any("all-reduce takes" in event.reason for event in planned(found))


def test_a_link_that_was_taken_for_slow_is_found_by_asking_it():
    """It carries what it is asked for, which looks like all it can; so it is asked for more."""
    aggregation, true = collocated(), mbit(34, 34, 47, 140)
    before = Links(true.up_bytes_per_s, mbit(34, 34, 47, 52).up_bytes_per_s)
    found = follow_links(SharePlanner(OPTIMAL, aggregation), [before] * 20 + [true] * 110)
    best_s = known_links(OPTIMAL, aggregation, [true])[0]

    assert found.exchange_s[20] > 1.1 * best_s
    assert found.exchange_s[-1] <= 1.02 * best_s


def test_a_prediction_that_fails_ends_shares():
    """Five exchanges in a row past 1.35 times the prediction and slower than all-reduce was."""
    aggregation, links = collocated(), mbit(*UNLIKE)
    planner = SharePlanner(OPTIMAL, aggregation)
    for step in range(16):
        plan = planner.plan
        done = play_exchange(aggregation, links, plan.shares, plan_epoch=plan.epoch)
        if step >= 5:  # after the first look, something that the links do not explain
            assert plan.parts is not None or step > 9
        if step >= 5 and plan.parts is not None:
            done = ObservedExchange(done.plan_epoch, 1.6 * done.exchange_s, done.transfers)
        planner.observe(step, done, next_step=step + 1)

    assert planner.plan.parts is None
    assert planner.plan.reason.startswith("plain all-reduce: shares t")
    assert planner.plan.first_step <= 10


def test_two_workers_and_one_stay_with_all_reduce():
    """No split is faster: nothing is looked for, ever."""
    for size in (1, 2):
        links = [mbit(*[100, 20][:size])] * 300
        found = follow_links(SharePlanner(OPTIMAL, collocated(size)), links)
        assert planned(found) == []


def test_an_exchange_of_an_older_plan_decides_nothing():
    """It still tells of links; what follows waits for the newest plan's own."""
    aggregation, links = collocated(), mbit(*UNLIKE)
    planner = SharePlanner(OPTIMAL, aggregation)
    for step in range(2):
        planner.observe(step, play_exchange(aggregation, links, None), next_step=step + 2)
    plan = planner.plan
    planner.observe(2, play_exchange(aggregation, mbit(9, 9, 9, 9), None), next_step=4)

    assert plan.epoch == 1
    assert planner.plan is plan


def test_figures_that_cannot_be_are_named_and_left_out():
    """The plan stays, and so do the links."""
    planner = SharePlanner(OPTIMAL, collocated())
    wrong = Transfers.from_rows(4, [(0, 2, 1e6, float("nan"))])
    for exchange in (ObservedExchange(0, float("nan")), ObservedExchange(0, 1.0, wrong)):
        (event,) = planner.observe(0, exchange, next_step=1)
        assert type(event).__name__ == "MeasurementRejected"
    assert event.rank == 2
    assert planner.links is None


def test_a_policy_that_fails_is_named_and_the_plan_stays():
    """Training goes on."""

    class Broken(AbstractSharePolicy):
        def init(self, aggregation):
            return None

        def update(self, aggregation, links, state):
            raise RuntimeError("no idea")

    found = follow_links(SharePlanner(Broken(), collocated()), [mbit(*UNLIKE)] * 12)
    failed = [event for event in found.events if type(event).__name__ == "PolicyFailed"]

    assert [(event.policy, event.problem) for event in failed] == [
        ("Broken", "RuntimeError: no idea")
    ]
    # The look at the links, by equal shares, was for one exchange: all-reduce goes on after it.
    assert [event.parts is None for event in planned(found)] == [False, True]


def test_shares_that_are_none_are_the_policys_mistake():
    """And a policy of evenstep's own that raises is none of a user's."""

    class Halves(AbstractSharePolicy):
        def init(self, aggregation):
            return None

        def update(self, aggregation, links, state):
            return ShareDecision(np.full(aggregation.world_size, 0.5), None, "two wholes")

    found = follow_links(SharePlanner(Halves(), collocated()), [mbit(*UNLIKE)] * 12)
    (failed,) = [event for event in found.events if type(event).__name__ == "PolicyFailed"]
    assert failed.policy == "Halves"
    assert "shares" in failed.problem

    own = OptimalShares()
    object.__setattr__(own, "margin", "lost")
    with pytest.raises(TypeError):
        follow_links(SharePlanner(own, collocated()), [mbit(*UNLIKE)] * 12)


def test_events_are_json_and_the_last_links_are_told():
    """Every exchange has its own, links when they have changed by 10 %."""
    aggregation = collocated()
    links = [mbit(*UNLIKE)] * 10 + [mbit(100, 200, 200, 50)] * 10
    found = follow_links(SharePlanner(OPTIMAL, aggregation), links)
    told = [event for event in found.events if isinstance(event, LinksMeasured)]

    assert len([event for event in found.events if isinstance(event, ExchangeMeasured)]) == 20
    assert 2 <= len(told) <= 6
    assert told[-1].up_bytes_per_s[0] == pytest.approx(12.5e6, rel=0.1)
    assert all(json.loads(json.dumps(to_record(event))) for event in found.events)


def test_all_reduce_is_tried_where_servers_hide_what_workers_could():
    """Servers became slow and workers fast, which shares do not show; found within 10 steps."""
    aggregation = dedicated()
    fast, slow = mbit(*[100] * 4, *[155] * 4), mbit(*[400] * 4, *[25] * 4)
    found = follow_links(
        SharePlanner(OPTIMAL, aggregation), [fast] * 130 + [slow] * 110, noise=0.05
    )
    looks = [event.step for event in planned(found) if "measuring what" in event.reason]

    assert len(looks) == 2
    assert 100 <= looks[0] <= 110
    assert found.plans[129].parts is not None
    assert found.plans[-1].parts is None
    assert max(found.exchange_s[-5:]) == pytest.approx(ring_s(aggregation, slow))


@pytest.mark.parametrize("rates", slow_but([[*UNLIKE]], [[*UNLIKE], [155, 110, 80, 60]]))
def test_all_reduce_is_not_tried_where_it_cannot_win(rates):
    """Among servers that all work, the slowest link limits both, and what it carries is known."""
    found = follow_links(SharePlanner(OPTIMAL, collocated()), [mbit(*rates)] * 120, noise=0.1)

    assert sum(plan.parts is None for plan in found.plans) == 2


def test_all_reduce_is_not_tried_behind_a_slow_worker():
    """Its link is full by shares, and would be for longer in a ring; without it, one look comes."""
    aggregation = dedicated()
    before, tried = mbit(*[100] * 8), []
    for slowest in (40, 100):
        after = mbit(slowest, 100, 100, 100, *[60] * 4)
        found = follow_links(
            SharePlanner(OPTIMAL, aggregation), [before] * 40 + [after] * 90, noise=0.05
        )
        tried.append(sum("measuring what" in event.reason for event in planned(found)))

    assert tried[0] == 0
    assert tried[1] >= 1


@pytest.mark.parametrize("margin", [-1, np.nan])
def test_a_margin_out_of_range_is_refused(margin):
    """By name."""
    with pytest.raises(ValueError, match=r"SharePlanner\(margin="):
        SharePlanner(OPTIMAL, collocated(), margin=margin)
