"""One worker's way through a step, and what is woven into the graph for it."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from evenstep._planner import Plan
from evenstep.tensorflow._training_steps import (
    TrainingSteps,
    weave_into_model,
    weave_into_optimizer,
)


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
        self.lost_ranks = self

    def report(self, step, made):
        self.reports += made()[-1].reports

    def at(self, step):
        return Plan(0, 0, (3, 9))

    def check(self):
        pass

    def enter_collective(self):
        pass

    def need_all(self, step):
        pass

    def leave_collective(self):
        pass


def conductor(clock, exchange, *, loss_reduction="mean", **options):
    steps = TrainingSteps(2, loss_reduction, clock=clock, **options)
    steps.begin(exchange)
    return steps


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

    with pytest.raises(RuntimeError, match=rf"no call of its {missing}\..*`next\(iterator\)`"):
        conducted.next_plan()


def test_a_batch_that_was_not_handed_out_is_noticed():
    """It has no weight, and nobody knows its size."""
    with pytest.raises(RuntimeError, match="did not hand out"):
        conductor(Clock(), Written()).gradients_done()


def test_one_worker_counts_what_it_is_handed():
    """Nothing is woven into a model that trains alone, which needs no exchange."""
    steps = TrainingSteps(1, "mean")
    steps.plan, steps.num_steps = Plan(0, 0, (12,)), 4
    for number in (4, 5):
        assert steps.num_done == number
        assert steps.next_plan().batch_size == (12,)
        steps.begin_step(12, global_num_samples=12, data_s=0.0)
    steps.end_epoch()

    assert (steps.num_done, steps.is_under_way) == (6, False)


class Steady:
    """A listener with one weight."""

    loss_reduction = "mean"
    forwarding = None
    is_resting = False

    def __init__(self, weight):
        self.weight = weight
        self.num_applied = 0

    def begin_forward(self):
        return self.weight

    def gradients_done(self):
        self.num_applied += 1


@pytest.mark.parametrize("dtype", [tf.float64, tf.float32, tf.bfloat16, tf.complex64])
def test_what_flows_back_is_weighted_without_rounding_the_weight(dtype):
    """1/3 in eight bits is off by a fifth of a per cent, for all samples of a worker alike."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Lambda(lambda x: tf.cast(x, dtype))])
    weave_into_model(model, Steady(1 / 3))
    x = tf.random.stateless_uniform((2000, 1), seed=(1, 2))
    factors = tf.cast(1 + x, dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x, training=True)
    gradient = tape.gradient(outputs, x, output_gradients=factors)
    flown = tf.reduce_sum(gradient) / tf.reduce_sum(tf.cast(factors, tf.float32))

    assert outputs.dtype == dtype
    assert float(flown) == pytest.approx(1 / 3, rel=3e-4)


def test_weaving_again_takes_the_place_of_what_was_woven():
    """A second balancer for the same parts is alone with them."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    listeners = [Steady(0.5), Steady(0.25)]
    for listener in listeners:
        weave_into_model(model, listener)
        weave_into_optimizer(optimizer, listener.gradients_done)
    x = tf.ones((1, 2))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, trainable_variables=model.trainable_variables)

    assert gradients[0].numpy().ravel().tolist() == [0.25, 0.25]
    assert [listener.num_applied for listener in listeners] == [0, 1]


class Breaking:
    """A reader of the machine that breaks in the second step."""

    def __init__(self):
        self.num_read = 0

    def read(self):
        self.num_read += 1
        if self.num_read > 1:
            raise OSError("no such counter")
        return 0.5, 1000


def test_a_reader_that_breaks_costs_the_balancing_and_not_the_training(caplog):
    """Rank 0 hears of it once, with the reader's name, and it is read no more."""
    clock, exchange, reader = Clock(), Written(), Breaking()
    conducted = TrainingSteps(2, "mean", clock=clock)
    conducted.begin(exchange, reader)
    for _ in range(4):
        step(conducted, clock)
    conducted.end_epoch()

    told = [report.fault for report in exchange.reports]
    assert told == ["", "Breaking failed (OSError: no such counter)", "", ""]
    assert [report.free_cpu for report in exchange.reports] == [0.5, None, None, None]
    assert reader.num_read == 2
    (record,) = caplog.records
    assert "Step 1: Breaking failed (OSError: no such counter). All ranks go on" in record.message
