"""One worker's way through a step."""

from __future__ import annotations

import pytest

from evenstep._planner import Plan
from evenstep.tensorflow._conductor import StepConductor
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

    def leave_collective(self):
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


def test_the_report_goes_out_before_the_wait():
    """In the first step too: who is late in it keeps the others waiting, and is to be named."""
    clock, exchange = Clock(), Written()
    conducted = conductor(clock, exchange)
    for number in (1, 2):
        step(conducted, clock)
        assert len(exchange.reports) == number


def test_a_step_with_more_calls_of_the_optimizer_is_reported_at_the_plan_point():
    """Late, but with all that it took; the next one with as many again at once."""
    clock, exchange = Clock(), Written()
    conducted = conductor(clock, exchange, num_optimizers=lambda: 3)
    for number in (0, 2):
        step(conducted, clock)
        conducted.gradients_done()
        assert len(exchange.reports) == number


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
    conducted = conductor(clock, exchange, num_optimizers=lambda: 2)
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

    with pytest.raises(RuntimeError, match=rf"its {missing} did not come by.*`next\(iterator\)`"):
        conducted.next_plan()


def test_a_batch_that_was_not_handed_out_is_noticed():
    """It has no weight, and nobody knows its size."""
    with pytest.raises(RuntimeError, match="did not hand out"):
        conductor(Clock(), Written()).gradients_done()
