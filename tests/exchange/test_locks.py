"""No thread waits for a lock whose owner waits for it."""

import threading
from collections import defaultdict

import pytest

from evenstep._exchange._divergence import DivergenceCheck
from evenstep._exchange._mailbox import Mailbox
from evenstep._exchange._message_kinds import NumbersReply, StepsReply
from evenstep._planner import Job, Planner, Report

from .channels import router
from .exchanges import Shifting, pairs, report, reports_of


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
            exchange.hear_out(exchange.last_step, limit_s=10.0)
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
