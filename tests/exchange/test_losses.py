"""A rank that is lost, hangs, leaves or goes another way is named to whoever waits for it."""

import socket
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from queue import Queue

import pytest

from evenstep._exchange._divergence import DivergenceCheck
from evenstep._exchange._exchange import Exchange
from evenstep._exchange._lost_ranks import FailureWatch, lost_worker
from evenstep._exchange._message_kinds import Reduced
from evenstep._planner import Job, Planner
from evenstep.events import StepMeasured, WorkerLost
from evenstep.exceptions import WorkerLostError

from .exchanges import PLAIN, Shifting, alone, channel_over, pairs, report, reports_of, router

STUCK = replace(PLAIN, is_stuck=lambda thread_id: True)


@pytest.fixture
def star():
    """Two exchanges over a pair of sockets, with what rank 0 emitted."""
    with pairs() as make:
        yield make


def test_a_lost_worker_is_an_error_for_everybody_who_waits():
    """With its rank and host, and an event on rank 0."""
    one, other = socket.socketpair()
    emitted = Queue()
    channel = channel_over({1: one}, heartbeat_s=0.05, deadline_s=5.0)
    exchange = Exchange(0, ["a", "b"], channel, framework=PLAIN, emit=emitted.put)
    exchange.start()
    exchange.lead(Planner(Shifting(), Job(2, 16)))
    exchange.at(0)
    report(exchange, 0, reports_of(0, 0, 8))
    other.close()

    with pytest.raises(WorkerLostError, match=r"Rank 1 on b was lost.*last checkpoint") as caught:
        exchange.at(1)
    exchange.close()

    assert caught.value.rank == 1
    assert isinstance(emitted.get(timeout=1), WorkerLost)


def test_a_rank_that_fails_in_the_middle_of_a_report_is_named(star):
    """It takes the step for reported, and no report of it ever comes."""
    both, _ = star()
    for rank in (0, 1):
        both[rank].at(0)
    report(both[0], 0, reports_of(0, 0, 8))

    both[1].last_step = 0  # and there it was interrupted
    both[1].lost_ranks.script_failed(KeyboardInterrupt())
    both[1].close()
    closing = threading.Timer(5, both[0].close)  # or it would wait for ever
    closing.start()

    with pytest.raises(WorkerLostError, match=r"Rank 1 on b was lost: it raised KeyboardInterrupt"):
        both[0].at(1)
    closing.cancel()


def test_a_thread_that_waits_hears_that_the_run_was_closed(star):
    """One that fetches ahead for a loop which was left early: it would keep the process alive."""
    both, _ = star()
    both[1].at(0)
    heard = Queue()

    def fetch():
        try:
            both[1].at(1, trains=False)
        except RuntimeError as error:
            heard.put(str(error))

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    wait_for(lambda: both[1]._awaited[False] == 0)
    both[1].close()

    assert heard.get(timeout=5) == "The balancer was closed, and with it this loader."
    thread.join(5)


def test_a_main_thread_stuck_in_a_collective_is_ended():
    """It would wait for half an hour, and nothing can interrupt it."""
    ended = Queue()
    exchange, other = alone(grace_s=0.1, abort=ended.put, framework=STUCK)

    exchange.lost_ranks.enter_collective()
    other.close()

    assert "Rank 1 on b was lost" in ended.get(timeout=5)
    exchange.close()


def outlast_the_grace(exchange, other):
    """Break the connection, and let two ticks pass that know of it: the grace, of 0 s, is over."""
    ticks, tick = Queue(), exchange.tick
    exchange.tick = lambda: (tick(), ticks.put(exchange.lost_ranks.is_broken))
    other.close()
    while not ticks.get(timeout=5):
        pass
    ticks.get(timeout=5)


def test_a_broken_collective_whose_error_is_handled_ends_nobody():
    """The handler may be saving a checkpoint: it runs outside of the backward."""
    ended = Queue()
    exchange, other = alone(grace_s=0.0, abort=ended.put)

    exchange.lost_ranks.enter_collective()  # and never left: an error was raised in there
    outlast_the_grace(exchange, other)

    assert ended.empty()
    assert exchange.lost_ranks.verdict(within_s=1).rank == 1
    exchange.close()


def test_outside_of_a_collective_nobody_is_ended():
    """An evaluation or a checkpoint may finish; the next step raises the error."""
    ended = Queue()
    exchange, other = alone(grace_s=0.0, abort=ended.put, framework=STUCK)

    exchange.lost_ranks.enter_collective()
    exchange.lost_ranks.leave_collective()
    outlast_the_grace(exchange, other)

    assert ended.empty()
    with pytest.raises(WorkerLostError, match="Rank 1 on b"):
        exchange.lost_ranks.check()
    exchange.close()


def wait_for(condition):
    """Wait until something that other threads bring about holds."""
    done = threading.Event()
    deadline = threading.Timer(10, done.set)
    deadline.start()
    while not condition() and not done.is_set():
        done.wait(0.01)
    deadline.cancel()
    assert condition()


def test_a_rank_that_hangs_is_an_error_where_it_is_waited_for(star):
    """Its heartbeats go on; past `hang_s` the others hear who it is, and where."""
    both, emitted = star(hang_s=0.5)
    for rank in (0, 1):
        both[rank].at(0)
    report(both[0], 0, reports_of(0, 0, 8))

    with pytest.raises(
        WorkerLostError, match=r"Rank 1 on b.*not finished step 0.*hang_s"
    ) as caught:
        both[0].at(1)

    assert "test_losses.py" in str(caught.value)  # this very thread plays both ranks
    assert isinstance(emitted.get(timeout=5), WorkerLost)
    wait_for(lambda: both[1].lost_ranks.is_broken)
    with pytest.raises(WorkerLostError, match=r"Rank 1 on b"):
        both[1].lost_ranks.check()


def test_nobody_hangs_while_nobody_waits(star):
    """Between two steps all may take their time."""
    both, _ = star(hang_s=0.15)
    for rank in (0, 1):
        both[rank].at(0)
        report(both[rank], 0, reports_of(rank, 0, 8))
    looks = Queue()
    look, both[0]._progress.look = both[0]._progress.look, lambda: looks.put(look())
    found = [looks.get(timeout=5) for _ in range(10)]

    assert found == [None] * 10
    assert both[0].at(1) == both[1].at(1)


def test_a_policy_that_never_comes_back_is_noticed(star):
    """It runs where rank 0 sends its heartbeats."""
    both, _ = star(deadline_s=0.5)
    gate, planner = threading.Event(), both[0].decisions.planner
    observe = planner.observe

    def never(*args, **kwargs):
        gate.wait(30)
        return observe(*args, **kwargs)

    planner.observe = never
    for rank in (1, 0):
        both[rank].at(0)
        report(both[rank], 0, reports_of(rank, 0, 8))
    try:
        with pytest.raises(WorkerLostError, match=r"Rank 0 on a was lost.*silent") as caught:
            both[1].at(1)
    finally:
        gate.set()

    assert caught.value.rank == 0


@pytest.mark.parametrize("leaves_first", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_an_answer_that_rank_0_never_gives_is_not_waited_for(star, trains, leaves_first):
    """A rank that fetches ahead may be no step further than rank 0, which raised."""
    (leaving, waiting), _ = star()
    for exchange in (leaving, waiting):
        exchange.at(0)

    def leave():
        leaving.lost_ranks.script_failed(ValueError("sample 17 has no label"))
        leaving.close()

    later = threading.Timer(0.0 if leaves_first else 0.3, leave)
    later.start()
    if leaves_first:
        later.join()
    with pytest.raises(WorkerLostError, match="it raised ValueError: sample 17 has no label"):
        waiting.at(2, trains=trains)
    later.join()


def test_a_thread_that_looks_ahead_at_the_end_of_a_run_loses_nothing(star):
    """Rank 0 came to its end without an error: so will the others."""
    (leaving, waiting), _ = star()
    for exchange in (leaving, waiting):
        exchange.at(0)

    def look_ahead():
        with pytest.raises(WorkerLostError, match="the test ends"):
            waiting.at(2, trains=False)

    ahead = threading.Thread(target=look_ahead)
    ahead.start()
    leaving.close()
    while 0 not in waiting.lost_ranks.left:
        ahead.join(0.01)
    waiting.lost_ranks.check_left()

    assert not waiting.lost_ranks.is_broken
    waiting.lost_ranks.lose(0, "the test ends")
    ahead.join()


LOSS = lost_worker(1, "b", "it is gone", done=6, restart="somebody does")


class Watched:
    """A watch whose seconds are told, over a thread that sits in a collective or does not."""

    def __init__(self, *, stuck=True):
        self.now_s = 100.0
        self.ended = []
        self.watch = FailureWatch(
            grace_s=3.0,
            abort=self.ended.append,
            is_stuck=lambda thread_id: stuck and thread_id == 7,
            clock=lambda: self.now_s,
        )

    def ended_at(self, *seconds):
        """Let the seconds pass one after the other; return at which the process was ended."""
        for self.now_s in seconds:
            self.watch.end_if_stuck(7)
            if self.ended:
                return self.now_s
        return None


def test_a_loss_is_raised_wherever_it_is_asked_for():
    """And before it nothing is."""
    watch = Watched().watch
    watch.check()
    watch.note(LOSS)

    with pytest.raises(WorkerLostError, match="Rank 1 on b was lost: it is gone"):
        watch.check()


def test_the_grace_begins_with_the_loss():
    """Whoever was in the collective for long may come out of it as late as anybody."""
    watched = Watched()
    watched.watch.enter_collective()
    watched.now_s = 200.0
    watched.watch.note(LOSS)

    assert watched.ended_at(201.0, 203.0, 203.5) == 203.5
    assert watched.ended == [str(LOSS)]


def test_the_grace_begins_anew_with_a_collective():
    """The loss is known for long: one that asks nobody gets its time in each of them."""
    watched = Watched()
    watched.watch.note(LOSS)
    watched.now_s = 200.0
    watched.watch.enter_collective()

    assert watched.ended_at(203.0, 204.0) == 204.0


def test_nobody_is_ended_who_can_hear_of_it():
    """Outside of a collective, by its own word or by the frame that it is in; or without a loss."""
    left, elsewhere, whole = Watched(), Watched(stuck=False), Watched()
    for watched in (left, elsewhere, whole):
        assert watched.watch.enter_collective()
        assert not watched.watch.enter_collective()
    for watched in (left, elsewhere):
        watched.watch.note(LOSS)
    left.watch.leave_collective()

    assert [watched.ended_at(200.0) for watched in (left, elsewhere, whole)] == [None] * 3
    assert [watched.watch.in_collective for watched in (left, elsewhere)] == [False, True]


def test_collectives_are_broken_off_once_and_soon_after_a_loss():
    """After a third of the grace: who is in none hears of the loss by itself meanwhile."""
    now_s, released = [100.0], []
    watch = FailureWatch(
        grace_s=3.0,
        abort=lambda message: None,
        is_stuck=lambda thread_id: False,
        release=lambda: released.append(now_s[0]),
        clock=lambda: now_s[0],
    )
    for now_s[0] in (100.0, 110.0):
        watch.end_if_stuck(7)
    watch.note(LOSS)
    for now_s[0] in (110.5, 111.5, 120.0):
        watch.end_if_stuck(7)

    assert released == [111.5]


def test_who_was_released_late_has_all_of_the_grace_to_come_out():
    """On a machine so busy that the first look after the loss comes past the grace."""
    now_s, ended = [100.0], []
    watch = FailureWatch(
        grace_s=3.0,
        abort=lambda message: ended.append(now_s[0]),
        is_stuck=lambda thread_id: True,
        release=lambda: None,
        clock=lambda: now_s[0],
    )
    watch.enter_collective()
    watch.note(LOSS)
    for now_s[0] in (110.0, 112.0, 114.0):
        watch.end_if_stuck(7)

    assert ended == [114.0]


@contextmanager
def three():
    """Three connected exchanges, none of which has begun a step."""
    ends = {rank: socket.socketpair() for rank in (1, 2)}
    stars = [{rank: ends[rank][0] for rank in ends}, *({0: ends[rank][1]} for rank in ends)]
    found = [
        Exchange(
            rank,
            ["a", "b", "c"],
            channel_over(star, heartbeat_s=0.05, deadline_s=10.0),
            framework=PLAIN,
            emit=lambda event: None,
            heartbeat_s=0.05,
        )
        for rank, star in enumerate(stars)
    ]
    for exchange in found:
        exchange.start()
    yield found
    for exchange in found:
        exchange.close()


@pytest.mark.parametrize("departs_first", [True, False])
def test_a_rank_whose_collective_broke_learns_who_left(departs_first):
    """Though rank 0 alone hears of that, whichever it hears of first."""
    with three() as (_, asking, leaving):
        if departs_first:
            leaving.lost_ranks.script_failed(ValueError("sample 17 has no label"))
            leaving.close()
        asking.lost_ranks.enter_collective()
        if not departs_first:
            assert asking.lost_ranks.verdict(within_s=0.2) is None
            leaving.lost_ranks.script_failed(ValueError("sample 17 has no label"))
            leaving.close()
        error = asking.lost_ranks.verdict(within_s=20)

        assert "Rank 2 on c was lost: it raised ValueError: sample 17 has no label" in str(error)
        assert error.rank == 2


def test_a_rank_that_nobody_needs_is_no_loss():
    """As at the end of a run, where some come earlier than others."""
    with three() as (first, other, leaving):
        leaving.close()
        other.close()
        first.close()

        assert not first.lost_ranks.is_broken
        assert not other.lost_ranks.is_broken


@pytest.mark.parametrize("told", ["reports", "ends"])
def test_rank_0_ends_with_the_last_reports_of_all(told):
    """It comes first to its end, with what others did not yet send: the last steps are measured."""
    with pairs() as make:
        (first, other), emitted = make(heartbeat_s=1.0)
        report(first, 0, reports_of(0, 0, 8))
        closing = threading.Thread(target=first.close)
        closing.start()
        closing.join(0.2)  # long enough to end too early
        if told == "reports":
            report(other, 0, reports_of(1, 0, 8))
        else:
            other.close()
        closing.join(5)
        steps = [event.step for event in list(emitted.queue) if isinstance(event, StepMeasured)]

        assert not closing.is_alive()
        assert steps == [0] * (told == "reports")


def told(world_size, *reduced):
    """Tell rank 0 what each rank reduced; return what it finds, at the first rank that shows it."""
    found = []
    ways = DivergenceCheck(router(0, world_size), differ=found.append)
    for rank, one in enumerate(reduced):
        ways.received(rank, one)
    return next(iter(found), None)


def once(*steps):
    return Reduced(0, 0, dict.fromkeys(steps, 1.0))


@pytest.mark.parametrize(
    "reduced",
    [
        [once(3), once(3), once(3)],
        [once(3, 4), once(3, 4), once(4, 3)],
        [Reduced(0, 0, {3: 2.0}), Reduced(0, 0, {3: None}), Reduced(0, 0, {3: 2.0})],
        [Reduced(0, 0, {}, maybe=(3, 4)), once(3), Reduced(0, 0, {}, maybe=(2, 3))],
        [Reduced(0, 0, {3: 0.1 + 0.2 + 0.7}), once(3), once(3)],
    ],
    ids=["one step", "two steps", "unknown share", "unknown step", "rounding"],
)
def test_the_same_batches_are_no_difference(reduced):
    """Also where a rank cannot tell all of it."""
    assert told(3, *reduced) is None


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (once(4), "step 4"),
        (once(3, 4), "step 3 and step 4"),
        (Reduced(0, 0, {3: 2.0}), "2 times step 3"),
        (Reduced(0, 0, {3: 0.5}), "0.5 times step 3"),
        (Reduced(0, 0, {}, maybe=(4, 5)), "one of the steps 4, 5"),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_rank_that_differs_is_named(odd, words, at):
    """With what it reduced, what the others did, and what to do."""
    reduced = [once(3), once(3), once(3)]
    reduced[at] = odd

    found = told(3, *reduced)

    assert f" gradients of {words} " in found.text or f"those of {words} " in found.text
    assert "step 3" in found.text
    assert "skip it on all" in found.text
    assert found.rank == at or at == 0  # of two that are known, either may be the odd one


def test_unlike_assignments_of_one_step_are_found():
    """By their checksums; a rank whose steps are not known has none."""
    one, other = Reduced(0, 0, {3: 1.0}, (), 9), Reduced(0, 0, {3: 1.0}, (), 8)

    assert told(3, one, one, Reduced(0, 0, {}, (3,))) is None
    assert "an assignment of samples with checksum 0x00000008" in told(3, one, one, other).text


def test_models_and_reductions_are_told_apart():
    """A rank may be further than another."""
    found = []
    ways = DivergenceCheck(router(0, 2), differ=found.append)

    alike = Reduced(0, 0, {3: 1.0}), Reduced(1, 0, {4: 1.0})
    for told in (*alike, Reduced(0, 1, {5: 1.0})):
        ways.received(0, told)
    for told in alike:
        ways.received(1, told)
    assert found == []
    ways.received(1, Reduced(0, 1, {6: 1.0}))
    assert found[0].rank in (0, 1)


@contextmanager
def hasty_threads():
    """Python changes between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_ranks_may_tell_of_a_reduction_at_the_same_moment():
    """Rank 0 from its training thread, the others by the channel's: nobody trips over that."""
    world, failed = 4, []
    ways = DivergenceCheck(router(0, world), differ=failed.append)
    together = threading.Barrier(world)

    def tell(rank):
        try:
            for number in range(2000):
                together.wait(30)
                ways.received(rank, Reduced(0, number, {1: 1.0}))
        except Exception as error:
            failed.append(error)
            together.abort()

    with hasty_threads():
        threads = [threading.Thread(target=tell, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert failed == []
