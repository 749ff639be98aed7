"""Integers by key, claims and locks: there when asked for, and nobody waits for ever."""

from __future__ import annotations

import math
import socket
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._exchange._divergence import DivergenceCheck
from evenstep._exchange._mailbox import Mailbox, UnitSums
from evenstep._exchange._message_kinds import ClaimReply, NumbersReply, StepsReply
from evenstep._planner import ClaimSwitch, Job, Planner, Report
from evenstep.claims import Hybrid
from evenstep.claims._step_claims import Claim

from .exchanges import Reading, Shifting, channel_over, pairs, report, reports_of, router, star


@pytest.fixture
def ends():
    made = star(3)
    yield made
    for end in made:
        end.channel.close()


@pytest.fixture(scope="module")
def pair():
    """Two ends for many examples, which leave nothing in them."""
    made = star(2)
    yield made
    for end in made:
        end.channel.close()


def ints(*numbers):
    return np.array(numbers, np.int64)


def test_integers_may_be_asked_for_before_or_after_they_are_posted(ends):
    """By a rank that is ahead of rank 0, and by one behind."""
    root, ahead, behind = ends
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ahead.box.share, (0, 1, 0), None)
        for block in range(3):
            root.box.share((0, 1, block), ints(block, 7))
        assert first.result(10).tolist() == [0, 7]
    for rank, blocks in ((behind, (2, 0, 1)), (ahead, (2, 1))):
        for block in blocks:
            assert rank.box.share((0, 1, block), None).tolist() == [block, 7]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 300), max_size=5))
def test_any_integers_arrive_as_they_are(pair, numbers):
    """Whatever their sizes, in however few bytes they travel."""
    (root, other), values = pair, ints(*numbers)
    root.box.post((0, 0, 0), values)

    arrived = other.box.take((0, 0, 0))
    assert arrived.dtype == np.int64
    assert arrived.tolist() == numbers


def test_what_a_round_left_behind_is_dropped_some_rounds_later(ends):
    """Of the same loader only; a loop may be left for another one, and gone on with."""
    root, other, _ = ends
    for key in ((0, 1, 0), (0, 2, 0), (1, 1, 0), (0, 10, 0)):
        root.box.post(key, ints(*key))
    other.box.take((0, 10, 0))

    assert list(other.router._here) == [(0, 2, 0), (1, 1, 0)]


def test_everybody_gets_everybodys_numbers_by_rank(ends):
    """Whoever comes first, and with a round more on its way."""
    waits = {}
    for rank in (2, 0, 1):
        for round_ in (1, 2):
            waits[rank, round_] = ends[rank].box.gather((0, round_, 0), [rank, round_])
    for round_ in (1, 2):
        for rank in range(3):
            assert waits[rank, round_]() == [[0, round_], [1, round_], [2, round_]]


def test_whoever_waits_learns_of_a_loss():
    """Rather than to wait for ever."""
    root, other = star(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.box.take, (0, 1, 0))
        root.channel.close()
        with pytest.raises(ConnectionError, match="rank 0"):
            waiting.result(10)
    other.channel.close()


def test_one_process_tells_nobody():
    """There is no channel."""
    alone = router()
    box = Mailbox(alone)
    alone.add(box)

    assert box.share((0, 1, 0), ints(3)).tolist() == [3]
    assert box.gather((0, 1, 0), [4])() == [[4]]


def test_the_sum_is_the_same_bits_everywhere():
    """Over a real connection, in any order."""
    one, other = socket.socketpair()
    channels = [
        channel_over({1 - rank: end}, heartbeat_s=1.0, deadline_s=9.0)
        for rank, end in enumerate((one, other))
    ]
    routers = [router(rank, 2, channels[rank]) for rank in (0, 1)]
    sums = [UnitSums(routers[rank], came_to=lambda step: None) for rank in (0, 1)]
    for rank in (0, 1):
        routers[rank].add(sums[rank])
        channels[rank].start(Reading(routers[rank]))

    first = [sums[rank].add(0, (0.1, 0.2)[rank]) for rank in (0, 1)]
    second = [sums[rank].add(1, (0.1, 0.2)[rank]) for rank in (1, 0)]
    for rank in (0, 1):
        sums[rank].wait(first[rank])
        sums[1 - rank].wait(second[rank])

    assert {each.total for each in (*first, *second)} == {math.fsum((0.1, 0.2))}
    for channel in channels:
        channel.close()


@pytest.fixture
def star_of_claim_requests():
    """Two exchanges over a pair of sockets, whose steps are up for claims."""
    with pairs() as make:
        yield lambda lag: make(lag=lag, claims=ClaimSwitch(Hybrid(first=0.5), adaptive=False))[0]


def all_claims(exchange, step):
    """Claim until nothing is left; return how many samples that gave."""
    count = 0
    while granted := exchange.claims.claim(step):
        count += sum(claim.num_samples for claim in granted)
    return count


def in_thread(call):
    """Start ``call`` in a thread, with a list for what it returns or raises."""
    result = []

    def run():
        try:
            result.append(call())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


@pytest.mark.parametrize("first_step", [0, 57])
def test_a_rank_behind_claims_by_the_plan_of_its_step(star_of_claim_requests, first_step):
    """Rank 0 may have gone on where nobody waits for a device, and claimed nothing itself."""
    both = star_of_claim_requests(lag=1)
    for step in range(first_step, first_step + 6):
        sizes = [both[rank].at(step).batch_size for rank in (0, 1)]
        report(both[0], step, reports_of(0, step, sizes[0][0]))
        both[0].at(step + 1)

        thread, counts = in_thread(lambda step=step: all_claims(both[1], step))
        thread.join(5)

        assert sizes[0] == sizes[1]
        assert counts == [16 - sum(size // 2 for size in sizes[1])]
        report(both[1], step, reports_of(1, step, sizes[1][1]))


def test_rank_0_answers_to_the_end_of_the_last_step(star_of_claim_requests):
    """It may come to its own end long before the others, who claim until nothing is left."""
    both = star_of_claim_requests(lag=1)
    for exchange in both:
        exchange.at(0)
    mine = all_claims(both[0], 0)
    report(both[0], 0, [])
    closing, _ = in_thread(both[0].close)
    closing.join(0.2)
    theirs = all_claims(both[1], 0)
    report(both[1], 0, [])
    closing.join(5)

    assert mine + theirs == 8
    assert not closing.is_alive()


def test_rank_0_waits_for_nobody_who_has_ended(star_of_claim_requests):
    """Such as one that left the step in the middle."""
    both = star_of_claim_requests(lag=0)
    for exchange in both:
        exchange.at(0)
    all_claims(both[0], 0)
    both[1].close()
    closing, _ = in_thread(both[0].close)
    closing.join(5)

    assert not closing.is_alive()


def test_the_answer_to_a_claim_that_was_broken_off_is_nobody_elses(star_of_claim_requests):
    """As where a signal's handler raises in the wait for it."""
    both = star_of_claim_requests(lag=0)
    both[1].at(0)
    claims = both[1].claims
    with both[0].claims._lock:  # which is slow to answer
        claiming, granted = in_thread(lambda: claims.claim(0))
        while not both[1]._router.misses(0):
            assert claiming.is_alive()
        claims.received(0, ClaimReply(0, (Claim(0, 4, 8),)))
    claiming.join(5)

    assert granted != [(Claim(0, 4, 8),)]
    assert granted[0][0].owner == 1


class Owner:
    """Looks whether another thread could publish meanwhile."""

    is_broken = False

    def __init__(self):
        self.changed, self.was_free = None, []

    def check(self):
        """No worker is lost."""

    def check_left(self):
        def publish():
            if self.changed.acquire(timeout=2.0):
                self.was_free.append(True)
                self.changed.release()

        thread = threading.Thread(target=publish)
        thread.start()
        thread.join()


def take_mail(asking):
    box = Mailbox(asking)
    posted = NumbersReply((0, 1, 0), "<u1", b"\x07")
    threading.Timer(0.1, lambda: box.received(0, posted)).start()
    assert box.take((0, 1, 0)).tolist() == [7]


def ask_for_steps(asking):
    ways = DivergenceCheck(asking, differ=lambda found: None)
    told = StepsReply((0, 3), (5,))
    threading.Timer(0.1, lambda: ways.received(0, told)).start()
    assert ways.steps_of((0, 3)) == (5,)


@pytest.mark.parametrize("wait", [take_mail, ask_for_steps])
def test_waiting_holds_up_no_decision(wait):
    """Rank 0 would never answer: its decision waits for the lock, and whoever has it for that."""
    owner = Owner()
    asking = router(1, 2, None, owner=owner)
    owner.changed = asking.changed

    wait(asking)

    assert owner.was_free == [True]


class Order:
    """Which locks threads took while they had which others, by name."""

    def __init__(self):
        self.after = defaultdict(set)
        self.held = defaultdict(list)  # by thread

    def reaches(self, name, goal, seen=()):
        return any(
            one == goal or (one not in seen and self.reaches(one, goal, (*seen, one)))
            for one in tuple(self.after[name])
        )

    @property
    def circles(self):
        return [name for name in tuple(self.after) if self.reaches(name, name)]


class Noted:
    """A lock in the place of another one, which notes when it is taken."""

    def __init__(self, lock, name, order):
        self.lock, self.name, self.order = lock, name, order

    def __enter__(self):
        self.acquire()
        return self

    def __exit__(self, *_):
        self.release()

    def acquire(self, *args, **settings):
        held = self.order.held[threading.get_ident()]
        if self.name not in held:  # the same one again is no wait
            for other in held:
                self.order.after[other].add(self.name)
        taken = self.lock.acquire(*args, **settings)
        if taken:
            held.append(self.name)
        return taken

    def release(self):
        self.order.held[threading.get_ident()].remove(self.name)
        self.lock.release()


def noted_locks(exchange, order):
    """Have an exchange's locks noted; return one for a loader."""
    rank = exchange._router.rank
    for part in ("_reports", "decisions", "_answers"):
        one = getattr(exchange, part)
        one._lock = Noted(one._lock, f"{part} {rank}", order)
    changed = Noted(threading.Lock(), f"changed {rank}", order)  # it is not taken twice
    exchange._router.changed = threading.Condition(changed)
    return Noted(threading.RLock(), f"loader {rank}", order)


def short(rank, step, size):
    """Return a report of a step of 5 ms: such reports are held."""
    return [Report(step, size, 16, 0.005, 0.0, wall_s=0.006)]


@pytest.mark.parametrize("reports", [reports_of, short])
def test_locks_are_taken_in_one_order(reports):
    """Held reports, then rank 0's decision, then what loaders that hear of it hold."""
    order = Order()
    with pairs() as make:
        both, _ = make(planner=Planner(Shifting(reading_s=0.03), Job(2, 16)))
        loaders = [noted_locks(exchange, order) for exchange in both]

        def train(exchange, loader):
            rank = exchange._router.rank

            def hear(plan):
                with loader:
                    pass

            exchange.subscribe(hear)
            for step in range(60):
                size = exchange.at(step).batch_size[rank]
                with loader:  # it cuts the batch
                    pass
                report(exchange, step, reports(rank, step, size))
            exchange.wait_for_reports(exchange.last_step, limit_s=10.0)
            exchange.close()

        threads = [
            threading.Thread(target=train, args=one) for one in zip(both, loaders, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

    assert order.reaches("_reports 0", "decisions 0")
    assert order.reaches("decisions 0", "loader 0")
    assert not order.circles


def test_a_decision_on_this_ranks_own_report_holds_up_no_heartbeat():
    """Whose reports are held: the thread that decides has their lock, and may wait for a loader."""
    ticked = []
    with pairs() as make:
        both, _ = make()

        def hear(plan):
            heartbeat = threading.Thread(target=lambda: ticked.append(both[0].tick()))
            heartbeat.start()
            heartbeat.join(10)
            assert not heartbeat.is_alive()

        both[0].subscribe(hear)
        for step in range(3):
            for rank in (1, 0):
                report(
                    both[rank], step, reports_of(rank, step, both[rank].at(step).batch_size[rank])
                )
                while rank and both[0].decisions.newest < step:  # rank 0's comes last
                    pass

    assert ticked
