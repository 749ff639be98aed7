"""One worker's way through a step, and what two of them say to each other."""

from __future__ import annotations

import threading

import pytest

from evenstep._exchange._channel import StarChannel
from evenstep._exchange._meeting import connect_star
from evenstep.control import Job, Plan, Planner, Report
from evenstep.exceptions import WorkerLostError
from evenstep.policies import Fixed
from evenstep.tensorflow._conductor import StepConductor
from evenstep.tensorflow._exchange import Exchange
from evenstep.tensorflow._machine import MachineReader


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Written:
    """An exchange that keeps what it is told, and always has the same plan."""

    def __init__(self):
        self.reports = []

    def report(self, report):
        self.reports.append(report)

    def at(self, step):
        return Plan(0, 0, (3, 9))


def conductor(clock, exchange, **options):
    settings = {"world_size": 2, "loss_reduction": "mean", "clock": clock, **options}
    return StepConductor(exchange, MachineReader(asked=False), **settings)


def step(conducted, clock, *, waits_s=5.0):
    """One step: a second between forward and gradients, and a wait for others after them."""
    conducted.next_plan()
    conducted.begin_step(3, global_num_samples=12, data_s=0.25)
    clock.now_s += 2  # what comes before the forward
    weight = conducted.begin_forward()
    clock.now_s += 1
    conducted.gradients_done()
    clock.now_s += waits_s
    return weight


def test_own_time_is_from_the_forward_to_the_gradients():
    """Neither what is done before nor the wait for others counts."""
    clock, exchange = Clock(), Written()
    conducted = conductor(clock, exchange)
    weights = [step(conducted, clock) for _ in range(3)]
    conducted.end_epoch()

    assert weights == [3 * 2 / 12] * 3
    assert conducted.num_done == 3
    assert [report.compute_s for report in exchange.reports] == [1.0] * 3
    assert [report.data_s for report in exchange.reports] == [0.25] * 3
    assert [report.step for report in exchange.reports] == [0, 1, 2]
    assert [report.wall_s for report in exchange.reports] == [None, 8.0, 8.0]


def test_from_the_second_step_on_the_report_goes_out_before_the_wait():
    """By then it is known how often the optimizer is called in a step."""
    clock, exchange = Clock(), Written()
    conducted = conductor(clock, exchange)
    step(conducted, clock)
    assert len(exchange.reports) == 0

    step(conducted, clock)
    assert len(exchange.reports) == 2


def test_two_optimizers_add_up_to_one_report():
    """As where a generator and its critic take turns: waits in between are left out."""
    clock, exchange = Clock(), Written()
    conducted = conductor(clock, exchange)
    for _ in range(2):
        step(conducted, clock)
        conducted.begin_forward()
        clock.now_s += 3
        conducted.gradients_done()

    assert [report.compute_s for report in exchange.reports] == [4.0, 4.0]


def test_sums_are_not_weighted():
    """Nor is what comes outside of a step."""
    clock = Clock()

    assert step(conductor(clock, Written(), loss_reduction="sum"), clock) == 1.0
    assert conductor(clock, Written()).begin_forward() == 1.0


@pytest.mark.parametrize(("forwards", "missing"), [(0, "optimizer"), (1, "optimizer")])
def test_a_batch_that_is_not_trained_on_is_noticed(forwards, missing):
    """Others would wait for its gradient for ever."""
    conducted = conductor(Clock(), Written())
    conducted.next_plan()
    conducted.begin_step(3, global_num_samples=12, data_s=0.0)
    for _ in range(forwards):
        conducted.begin_forward()

    with pytest.raises(RuntimeError, match=f"its {missing} did not come by"):
        conducted.next_plan()


def test_a_batch_that_was_not_handed_out_is_noticed():
    """It has no weight, and nobody knows its size."""
    with pytest.raises(RuntimeError, match="did not hand out"):
        conductor(Clock(), Written()).gradients_done()


def connected():
    """The connections of two workers, by rank."""
    box, stars = {}, {}
    there = threading.Event()

    def share(value):
        if value is not None:
            box["meeting"] = value
            there.set()
        assert there.wait(10)
        return box["meeting"]

    def connect(rank):
        stars[rank] = connect_star(rank, 2, share, addresses=["127.0.0.1"])

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return stars


@pytest.fixture
def pair():
    """Two exchanges that are connected, and what happened on each."""
    stars = connected()
    happened = ([], [])
    made = []
    for rank in range(2):
        star = stars[rank]
        channel = StarChannel(
            star.connections, heartbeat_s=0.05, deadline_s=5, star=star, reconnect_s=0.1
        )
        made.append(
            Exchange(
                rank,
                ("first", "second"),
                channel,
                emit=happened[rank].append,
                grace_s=1000,
                release=happened[rank].append,
            )
        )
    for exchange in made:
        exchange.start()
    made[0].lead(Planner(Fixed((3, 9)), Job(2, 12)))
    yield made, happened, stars
    for exchange in made:
        exchange.close()


def test_both_workers_get_the_plan_of_a_step_once_both_have_reported(pair):
    """And not before."""
    (first, second), _, _ = pair
    assert [exchange.at(0).batch_size for exchange in (first, second)] == [(3, 9)] * 2

    got = []
    waiting = threading.Thread(target=lambda: got.append(first.at(1)))
    waiting.start()
    first.report(Report(0, 3, 12, 1.0, 0.0))
    assert got == []
    second.report(Report(0, 9, 12, 2.0, 0.0))
    waiting.join(10)

    assert got[0].batch_size == second.at(1).batch_size == (3, 9)
    assert first.learnt() is not None


def test_a_worker_that_ends_its_run_early_is_named(pair):
    """The others would wait for it in their next collective."""
    (first, second), happened, _ = pair
    for exchange, size in ((first, 3), (second, 9)):
        exchange.at(0)
        exchange.report(Report(0, size, 12, 1.0, 0.0))
    second.close()
    lost = first.verdict(within_s=10)

    assert lost.rank == 1
    assert "Rank 1 on second was lost: it ended its run after step 0" in str(lost)
    assert str(lost) in happened[0]
    with pytest.raises(WorkerLostError):
        first.at(1)


def test_a_broken_connection_ends_the_collective_with_the_name_in_it(pair):
    """So that a training thread comes out of TensorFlow."""
    (first, _), happened, stars = pair
    first.at(0)
    stars[0].server.close()
    stars[1].connections[0].close()
    lost = first.verdict(within_s=10)

    assert lost is not None
    assert lost.rank == 1
    assert str(lost) in happened[0]
