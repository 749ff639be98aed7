"""Reports in, plans out: numbered, the same on all ranks, in time."""

import random
import threading
from dataclasses import replace
from queue import Queue
from time import monotonic

import msgspec
import pytest

from evenstep._exchange._channel import Peer, Wire
from evenstep._exchange._message_kinds import StepReports, read
from evenstep._planner import Report
from evenstep.events import MeasurementRejected, StepMeasured
from evenstep.exceptions import WorkerLostError

from .exchanges import alone, gathering, pairs, report, reports_of, short


@pytest.fixture
def star():
    """Two exchanges over a pair of sockets, with what rank 0 emitted."""
    with pairs() as make:
        yield make


def play(both, num_steps, *, reports=reports_of):
    """Run both ranks through some steps; return the sizes that each was told, by step.

    Both have reported all steps by then, and the plan after them is the last.
    """
    told = [[], []]

    def go(rank):
        for step in range(num_steps):
            plan = both[rank].at(step)
            told[rank].append(plan.batch_size)
            report(both[rank], step, reports(rank, step, plan.batch_size[rank]))
        told[rank].append(both[rank].at(num_steps).batch_size)
        both[rank].wait_for_reports(both[rank].last_step, limit_s=10.0)

    threads = [threading.Thread(target=go, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return told


def test_step_k_decides_the_next_step(star):
    """Without lag; the first measured step warms up."""
    both, _ = star()

    mine, theirs = play(both, 4)

    assert mine == theirs
    assert mine == [(8, 8), (8, 8), (7, 9), (6, 10), (5, 11)]


def test_a_resumed_run_counts_on(star):
    """Its first step has a number of its own, and starts with the first plan."""
    both, _ = star()
    told = []
    for step in range(57, 60):
        for rank in (0, 1):
            plan = both[rank].at(step)
            report(both[rank], step, reports_of(rank, step, plan.batch_size[rank]))
        told.append(plan.batch_size)

    assert told == [(8, 8), (8, 8), (7, 9)]


def test_with_lag_step_k_decides_the_one_after_the_next(star):
    """As on a device that nobody waits for."""
    both, _ = star(lag=1)

    mine, theirs = play(both, 4)

    assert mine == theirs
    assert mine == [(8, 8), (8, 8), (8, 8), (7, 9), (6, 10)]


def test_a_rank_that_looks_ahead_waits_for_no_report(star):
    """A loop fetches two batches before it uses the first: all ranks are told the same plan."""
    both, _ = star()
    told = {
        rank: [both[rank].at(step, may_look_ahead=True).batch_size for step in range(3)]
        for rank in (1, 0)
    }
    for step in range(8):
        for rank in (0, 1):
            report(both[rank], step, reports_of(rank, step, told[rank][step][rank]))
        while both[0].newest_done < step:  # pytest's own limit ends it
            pass
        for rank in (1, 0):
            told[rank].append(both[rank].at(step + 3, may_look_ahead=True).batch_size)

    assert told[0] == told[1]
    assert told[0][:4] == [(8, 8)] * 4
    assert told[0][4:6] == [(7, 9), (6, 10)]  # step 1 decides 4: two were handed out already


def test_a_plan_never_changes_a_step_that_was_answered(star):
    """However far the fastest rank looks ahead of the others."""
    both, _ = star()
    heard = [[], []]
    for rank in (0, 1):
        both[rank].subscribe(heard[rank].append)
    ahead = [both[1].at(step, may_look_ahead=True) for step in range(6)]
    for step in range(6):
        report(both[1], step, reports_of(1, step, ahead[step].batch_size[1]))
        plan = both[0].at(step, may_look_ahead=True)
        assert plan.batch_size == ahead[step].batch_size
        report(both[0], step, reports_of(0, step, plan.batch_size[0]))
    both[0].at(6, may_look_ahead=True)

    changed = [plan for plan in heard[0] if plan.epoch]
    assert changed
    assert all(plan.first_step >= 6 for plan in changed)


def test_every_plan_is_announced_once_and_in_order(star):
    """Listeners replay them; a missing one would part the ranks."""
    both, _ = star()
    heard = [[], []]
    for rank in (0, 1):
        both[rank].subscribe(lambda plan, rank=rank: heard[rank].append(plan.epoch))

    play(both, 5)

    assert heard[0] == [1, 2, 3, 4]
    assert [epoch for epoch in heard[1] if epoch] == [1, 2, 3, 4]


def test_every_step_becomes_an_event(star):
    """On rank 0, with both ranks' figures."""
    both, emitted = star()

    play(both, 3)
    both[0].close()  # what is still to be told is told
    steps = [event for event in list(emitted.queue) if isinstance(event, StepMeasured)]

    assert [event.step for event in steps] == [0, 1, 2]
    assert [event.batch_size for event in steps] == [(8, 8), (8, 8), (7, 9)]
    assert steps[0].compute_s == pytest.approx((0.1, 0.2))
    assert steps[2].plan_epoch == 1


def test_late_measurements_are_planned_by_all_at_once(star):
    """Two steps that become known together make two plans, and both are announced."""
    both, _ = star(lag=1)
    heard = []
    both[1].subscribe(lambda plan: heard.append(plan.epoch))
    for rank in (0, 1):
        both[rank].at(0)
        report(both[rank], 0, [])
        report(both[rank], 1, [])
    for rank in (0, 1):
        report(both[rank], 2, [*reports_of(rank, 0, 8), *reports_of(rank, 1, 8)])
        report(both[rank], 3, reports_of(rank, 2, 8))

    plan = both[1].at(5)

    assert plan.batch_size == (6, 10)
    assert [epoch for epoch in heard if epoch] == [1, 2]


def test_a_step_that_one_rank_did_not_measure_is_left_out(star):
    """The plan stays, and nobody waits."""
    both, _ = star()
    both[1].at(0)
    for step in range(3):
        report(both[0], step, reports_of(0, step, 8))
        report(both[1], step, [] if step == 1 else reports_of(1, step, 8))

    assert both[1].at(2).batch_size == (8, 8)
    assert both[1].at(3).batch_size == (7, 9)


def test_times_that_cannot_be_travel_and_are_told(star):
    """NaN and infinity reach rank 0 as they are; the plan stays, and nobody waits by them."""
    both, emitted = star()
    for step, seconds in enumerate((0.2, 0.2, float("nan"), float("inf"), -1.0, 0.2)):
        plans = [both[rank].at(step) for rank in (0, 1)]
        report(both[0], step, reports_of(0, step, plans[0].batch_size[0]))
        report(both[1], step, [Report(step, plans[1].batch_size[1], 16, seconds, data_s=0.0)])
    plans = [both[rank].at(6).batch_size for rank in (0, 1)]
    both[0].close()
    rejected = [e.step for e in list(emitted.queue) if isinstance(e, MeasurementRejected)]

    assert plans == [(6, 10), (6, 10)]
    assert rejected == [2, 3, 4]


def test_a_message_that_is_not_known_ends_the_run_by_name(star):
    """It is never dropped: what its sender then waits for would never come."""
    both, _ = star()
    both[1]._channel.send(0, msgspec.msgpack.encode([["LaterKind", 3]]))

    for rank in (0, 1):
        both[rank].at(0)
    with pytest.raises(WorkerLostError, match=r"Rank 1 on b was lost: it sent .*LaterKind"):
        both[0].at(1)
    with pytest.raises(WorkerLostError, match="Rank 1 on b was lost"):
        both[1].at(1)


def test_an_answer_and_its_plan_are_one_message():
    """On a thousand connections, two would take rank 0 twice as long."""
    exchange, other = alone(starts=False)  # a plan that waits for no answer is told by a thread
    peer, messages = Peer(other, Wire(b"", is_caller=True)), []
    while not messages:
        messages += peer.receive() or ()
    exchange.close()
    other.close()

    assert [[type(one).__name__ for one in read(data)] for data in messages] == [
        ["PlanReply", "Answer"]
    ]


def test_a_plan_that_no_answer_follows_is_told_too(star):
    """Before the next answer: ranks replay all plans."""
    both, _ = star()
    heard = Queue()
    both[1].subscribe(heard.put)
    plan = replace(both[0].at(0), epoch=9)

    both[0]._answers.announce(plan)

    while heard.get(timeout=5) != plan:
        pass


def test_short_steps_are_decided_on_together_and_each_is_measured(star):
    """All ranks have the same sizes in each step, and rank 0 has heard of all before the end."""
    both, emitted = star(planner=gathering())

    mine, theirs = play(both, 100, reports=short)
    for exchange in both:
        exchange.close()
    events = [emitted.get_nowait() for _ in range(emitted.qsize())]

    assert mine == theirs
    assert 2 < len(set(mine)) < 20
    assert [event.step for event in events if isinstance(event, StepMeasured)] == list(range(100))


def test_a_rank_that_ends_waits_until_all_have_reported_its_last_step(star):
    """Not only for the plan after it, which may be known before."""
    both, _ = star(planner=gathering())
    play(both, 12, reports=short)
    step = 12
    for rank in (0, 1):
        both[rank].at(step)
    report(both[0], step, short(0, step, 8))
    ended = threading.Event()

    def end():
        both[0].wait_for_reports(both[0].last_step, limit_s=20.0)
        ended.set()

    thread = threading.Thread(target=end)
    thread.start()
    assert not ended.wait(0.2)
    report(both[1], step, short(1, step, 8))
    assert ended.wait(10)
    thread.join()


def test_a_rank_that_ends_waits_for_no_answer_of_one_that_has_left(star):
    """Rank 0 leaves once it knows all reports, perhaps before it is asked for them."""
    both, _ = star()
    for rank in (0, 1):
        report(both[rank], 0, reports_of(rank, 0, both[rank].at(0).batch_size[rank]))
    both[0].wait_for_reports(both[0].last_step, limit_s=10.0)
    both[0].close()
    begin_s = monotonic()
    both[1].wait_for_reports(both[1].last_step, limit_s=20.0)

    assert monotonic() - begin_s < 10.0


@pytest.mark.parametrize("loser", [0, 1])
def test_a_loss_in_a_hold_names_the_newest_step_whose_gradients_were_summed(star, loser):
    """No rank has sent reports of these steps."""
    both, first, _ = in_a_hold(star)
    for exchange in both:
        go_through(exchange, range(first, first + 2))
        exchange.last_reduced = first + 1
        go_through(exchange, [first + 2])  # accumulated, say: a rank may pass it alone
    both[loser].lost(1 - loser, "it is gone")

    with pytest.raises(WorkerLostError, match=rf"complete on all ranks is {first + 1}\."):
        both[loser].lost_ranks.check()


@pytest.mark.parametrize("teller", [0, 1])
def test_a_loss_names_no_step_that_some_rank_is_still_in(star, teller):
    """Answers that are asked for ahead say nothing of it; rank 0 tells what it knows."""
    both, _ = star()
    ahead = [[both[rank].at(step, may_look_ahead=True) for step in range(2)] for rank in (0, 1)]
    for step in range(5):
        for rank in (0, 1):
            ahead[rank].append(both[rank].at(step + 2, may_look_ahead=True))
            size = ahead[rank][step].batch_size[rank]
            if (rank, step) != (0, 4):
                report(both[rank], step, reports_of(rank, step, size))
            both[rank].last_reduced = step - 1
    while both[0].newest_done < 3:
        pass
    both[teller].lost(1 - teller, "it is gone")
    while not both[1].lost_ranks.is_broken:  # pytest's own limit ends it
        pass

    for rank in {teller, 1}:
        with pytest.raises(WorkerLostError, match=r"complete on all ranks is 3\."):
            both[rank].lost_ranks.check()


def in_a_hold(star, **settings):
    """Return two exchanges in the middle of a plan of several short steps: the next, and its last.

    Of 6 ms, so that eight are decided on together.
    """
    both, _ = star(planner=gathering(), heartbeat_s=60.0, **settings)
    play(both, 28, reports=short)
    first, due = 28, both[0]._answers.due
    assert first + 3 < due
    return both, first, due


def go_through(exchange, steps):
    """Have one rank come to steps and report them; return the sizes of each."""
    sizes = []
    for step in steps:
        sizes.append(exchange.at(step).batch_size)
        rank = exchange._router.rank
        report(exchange, step, short(rank, step, sizes[-1][rank]))
    return sizes


def test_no_rank_waits_before_the_step_that_is_due_or_sends_anything(star):
    """The plan stays until then, and all wait for the next one."""
    both, first, due = in_a_hold(star)

    ahead = go_through(both[1], range(first, due))  # rank 0 has reported none of these
    woken = threading.Event()
    both[1]._channel.call_soon(woken.set)
    assert woken.wait(10)
    assert both[1]._reports.num_held == due - first
    ahead += go_through(both[1], [due])
    behind = go_through(both[0], range(first, due + 1))
    after = [exchange.at(due + 1).batch_size for exchange in both]

    assert len({*ahead, *behind}) == 1
    assert after[0] == after[1] != ahead[0]
    assert [exchange._reports.num_held for exchange in both] == [0, 0]


@pytest.mark.parametrize("asker", [0, 1])
def test_a_stop_in_the_middle_of_a_hold_ends_all_ranks_at_the_same_step(star, asker):
    """At a step that none has passed, though one may be ahead of the one that asks."""
    both, first, due = in_a_hold(star)
    go_through(both[1 - asker], range(first, due + 1))
    both[asker].at(first)
    both[asker].ask_to_stop()
    report(both[asker], first, short(asker, first, 8))
    go_through(both[asker], range(first + 1, due + 1))
    early = [exchange.stopping for exchange in both]
    for exchange in both:
        exchange.at(due + 1)

    assert early == [False, False]
    assert [exchange.stopping for exchange in both] == [True, True]


def test_a_heartbeat_sends_what_was_noted_in_a_hold(star):
    """So that rank 0 knows how far each rank is, however long the next step takes."""
    both, _ = star(planner=gathering())
    play(both, 28, reports=short)
    for exchange in both:
        go_through(exchange, [28])
    while both[0].newest_done < 28:  # pytest's own limit ends it
        pass

    assert both[0]._answers.due > 28


def test_a_run_that_ends_in_the_middle_of_a_hold_has_each_step_measured(star):
    """Rank 0 hears of them as ranks end, and tells of them though no plan follows."""
    both, emitted = star(planner=gathering(), heartbeat_s=60.0)
    play(both, 28, reports=short)
    for exchange in both:
        exchange.close()
    told = [event.step for event in list(emitted.queue) if isinstance(event, StepMeasured)]

    assert told == list(range(28))


def test_a_rank_that_stands_still_in_a_hold_is_named(star):
    """Others have gone ahead, and wait for the plan that it has to report for."""
    both, _ = star(planner=gathering(), hang_s=0.5)
    play(both, 28, reports=short)
    go_through(both[1], [28])
    go_through(both[0], range(28, both[0]._answers.due + 1))

    with pytest.raises(WorkerLostError, match=r"Rank 1 on b.*not finished step 29.*hang_s"):
        both[0].at(both[0].last_step + 1)


def test_rank_0_misses_a_rank_that_left_while_its_own_reports_are_held(star):
    """It is in a step that the other has not done, though no message says so yet."""
    both, _ = star(planner=gathering())
    play(both, 12, reports=short)
    both[1].close()
    while not both[0].lost_ranks.left:  # pytest's own limit ends it
        pass
    begun = []

    def go_on():
        for step in range(12, 24):  # more than one plan holds for
            begun.append(step)
            both[0].at(step)
            report(both[0], step, short(0, step, 8))
            both[0].lost_ranks.check()

    with pytest.raises(WorkerLostError, match=r"Rank 1.* complete on all ranks is 11\."):
        go_on()
    assert begun == [12]


NUM_STEPS = 100
LOOPS = [
    # lag, steps fetched ahead, steps by which a device is late, share of steps that are not used
    (0, 0, 0, 0.0),
    (0, 0, 0, 0.1),
    (0, 1, 0, 0.0),
    (0, 3, 0, 0.1),
    (1, 0, 1, 0.0),
    (1, 0, 1, 0.1),
    (1, 1, 0, 0.1),
    (1, 3, 1, 0.0),
]


def train(exchange, told, used, *, ahead, late, took_s):
    """Run one rank's loop; note the sizes of each step."""
    rank, waiting, fetched = exchange._router.rank, [], 0
    for step in range(NUM_STEPS):
        while fetched <= min(step + ahead, NUM_STEPS - 1):
            told.append(exchange.at(fetched, may_look_ahead=True).batch_size)
            fetched += 1
        if step not in used:
            continue
        size, seconds = told[step][rank], took_s[step]
        waiting.append(Report(step, size, 16, seconds, 0.0, wall_s=1.2 * seconds))
        ready = tuple(waiting[: len(waiting) - late])
        del waiting[: len(ready)]
        exchange.report(step, lambda step=step, ready=ready: [StepReports(step, ready)])
    exchange.wait_for_reports(exchange.last_step, limit_s=10.0)
    exchange.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("lag", "ahead", "late", "unused"), LOOPS)
def test_all_ranks_have_one_plan_in_each_step(lag, ahead, late, unused, seed):
    """In steps of 1, 5 and 30 ms, of which some have no backward on any rank; each is measured."""
    rng = random.Random(seed)
    took_s = [rng.choice([0.001, 0.005, 0.005, 0.03]) if seed else 0.005 for _ in range(NUM_STEPS)]
    used = [step for step in range(NUM_STEPS) if rng.random() >= unused]
    told = [], []
    with pairs() as make:
        both, emitted = make(lag=lag, planner=gathering(), heartbeat_s=60.0)
        threads = [
            threading.Thread(
                target=train,
                args=(exchange, sizes, used),
                kwargs={"ahead": ahead, "late": late, "took_s": took_s},
                daemon=True,
            )
            for exchange, sizes in zip(both, told, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    measured = [event.step for event in list(emitted.queue) if isinstance(event, StepMeasured)]

    assert [len(sizes) for sizes in told] == [NUM_STEPS] * 2
    assert told[0] == told[1]
    assert ahead or len(set(told[0])) > 1  # a loop that looks ahead waits for no plan
    assert measured == (used[:-1] if late else used)
