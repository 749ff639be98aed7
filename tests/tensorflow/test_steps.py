"""One worker's way through a step, and what two of them say to each other."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from evenstep._exchange._channel import StarChannel
from evenstep._exchange._exchange import Exchange
from evenstep._exchange._meeting import connect_star
from evenstep.control import Job, Plan, Planner, Report
from evenstep.exceptions import WorkerLostError
from evenstep.policies import Fixed
from evenstep.tensorflow._board import difference
from evenstep.tensorflow._conductor import StepConductor
from evenstep.tensorflow._exchange import TENSORFLOW, StepExchange
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

    def enter_collective(self, step):
        pass


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


def test_mapping_own_samples_is_own_time():
    """It comes before the forward, and grows with them."""
    clock, exchange = Clock(), Written()
    conducted = conductor(clock, exchange)
    conducted.next_plan()
    conducted.begin_step(3, global_num_samples=12, data_s=0.25)
    conducted.begin_work()
    clock.now_s += 4
    conducted.end_work()
    clock.now_s += 2
    conducted.begin_forward()
    clock.now_s += 1
    conducted.gradients_done()
    conducted.end_epoch()

    assert [report.compute_s for report in exchange.reports] == [5.0]


def test_the_only_step_of_a_run_is_reported_when_it_closes():
    """Others would take this worker for lost; a batch that was not trained on is left alone."""
    for gradients, number in ((True, 1), (False, 0)):
        clock, exchange = Clock(), Written()
        conducted = conductor(clock, exchange)
        conducted.next_plan()
        conducted.begin_step(3, global_num_samples=12, data_s=0.25)
        conducted.begin_forward()
        if gradients:
            conducted.gradients_done()
        conducted.close()

        assert len(exchange.reports) == number


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
    """Two exchanges that are connected, what their steps say, and what happened on each."""
    yield from joined()


@pytest.fixture
def impatient():
    """Two that do not wait for long."""
    yield from joined(heartbeat_s=0.05, hang_s=0.5)


def joined(**settings):
    stars = connected()
    happened = ([], [])
    made = []
    for rank in range(2):
        star = stars[rank]
        channel = StarChannel(
            star.connections, heartbeat_s=0.05, deadline_s=5, star=star, reconnect_s=0.1
        )
        exchange = Exchange(
            rank,
            ("first", "second"),
            channel,
            framework=TENSORFLOW,
            emit=happened[rank].append,
            grace_s=1000,
            **settings,
        )
        exchange.on_loss = lambda error, told=happened[rank]: told.append(str(error))
        made.append(exchange)
    for exchange in made:
        exchange.start()
    made[0].lead(Planner(Fixed((3, 9)), Job(2, 12)))
    yield made, [StepExchange(exchange) for exchange in made], happened, stars
    for exchange in made:
        exchange.close()


def test_both_workers_get_the_plan_of_a_step_once_both_have_reported(pair):
    """And not before."""
    exchanges, (first, second), _, _ = pair
    assert [steps.at(0).batch_size for steps in (first, second)] == [(3, 9)] * 2

    got = []
    waiting = threading.Thread(target=lambda: got.append(first.at(1)))
    waiting.start()
    first.report(Report(0, 3, 12, 1.0, 0.0))
    assert got == []
    second.report(Report(0, 9, 12, 2.0, 0.0))
    waiting.join(10)

    assert got[0].batch_size == second.at(1).batch_size == (3, 9)
    assert exchanges[0].learnt() is not None


def test_a_worker_that_ends_its_run_early_is_named(pair):
    """The others would wait for it in their next collective, which a late report comes after."""
    exchanges, steps, happened, _ = pair
    for each, size in zip(steps, (3, 9), strict=True):
        each.at(0)
        each.report(Report(0, size, 12, 1.0, 0.0))
    steps[0].enter_collective(0)
    exchanges[1].close()
    lost = exchanges[0].verdict(within_s=10)

    assert lost.rank == 1
    assert "Rank 1 on second was lost: it ended its run after step 0" in str(lost)
    assert str(lost) in happened[0]
    with pytest.raises(WorkerLostError):
        steps[0].at(1)


def test_the_next_step_does_not_begin_without_a_worker_that_ended_its_run(pair):
    """Its collective would hang, and if the report comes after that nobody would say so."""
    exchanges, steps, _, _ = pair
    for each, size in zip(steps, (3, 9), strict=True):
        each.at(0)
        each.report(Report(0, size, 12, 1.0, 0.0))
    steps[0].at(1)
    exchanges[1].close()
    steps[0].enter_collective(1)
    with pytest.raises(WorkerLostError, match="others are at 1"):
        raise exchanges[0].verdict(within_s=10)


def test_a_broken_connection_ends_the_collective_with_the_name_in_it(pair):
    """So that a training thread comes out of TensorFlow."""
    (first, _), (steps, _), happened, stars = pair
    steps.at(0)
    steps.enter_collective(0)
    stars[0].server.close()
    stars[1].connections[0].close()
    lost = first.verdict(within_s=10)

    assert lost is not None
    assert lost.rank == 1
    assert str(lost) in happened[0]


def test_a_worker_that_hangs_while_its_process_lives_is_named(impatient):
    """The chief asks it where it is, and ends the run for all."""
    exchanges, (first, second), happened, _ = impatient
    for steps in (first, second):
        steps.at(0)
    first.report(Report(0, 3, 12, 1.0, 0.0))
    with pytest.raises(WorkerLostError, match="has not finished step 0") as lost:
        first.at(1)
    with pytest.raises(WorkerLostError):
        second.at(1)

    assert lost.value.rank == 1
    assert "; it is " in str(lost.value)  # where, as it said itself
    assert str(lost.value) in happened[0]
    assert all(exchange.is_broken for exchange in exchanges)


def test_who_was_told_of_a_loss_may_take_its_time(pair):
    """It may be saving what there is, in TensorFlow's own code."""
    (first, _), (steps, _), _, _ = pair
    ended = []
    first._abort, first._grace_s = ended.append, -1.0
    first._framework = replace(TENSORFLOW, is_stuck=lambda thread_id: True)
    steps.at(0)
    steps.enter_collective(0)
    first.lost(1, "it is gone")
    first.tick()
    assert len(ended) == 1

    with pytest.raises(WorkerLostError):
        steps.at(1)
    first.tick()
    assert len(ended) == 1


def test_what_differs_between_workers_is_named():
    """The first setting that does, and on whom."""
    same = {"global batch size": 12, "order": "shuffled by seed 0"}

    assert difference([same, dict(same)]) is None
    other = {**same, "order": "shuffled by seed 2"}
    assert difference([same, same, other]) == (
        "order: shuffled by seed 0 on rank 0 and shuffled by seed 2 on rank 2"
    )
