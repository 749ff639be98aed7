"""One worker's way through a step, two workers' exchanges, and pipelines that drift apart."""

from __future__ import annotations

import json
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from evenstep._planner import Job, Plan, Planner
from evenstep.exceptions import WorkerLostError
from evenstep.policies import Fixed
from evenstep.tensorflow import Runtime
from evenstep.tensorflow._keras_session import KerasSession
from evenstep.tensorflow._source import Tally, check_same_samples
from evenstep.tensorflow._strategy_workers import TENSORFLOW, StrategyWorkers
from evenstep.tensorflow._training_steps import (
    TrainingSteps,
    weave_into_model,
    weave_into_optimizer,
)

from ..exchange.exchanges import linked


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


@pytest.fixture
def pair():
    """Two exchanges that are connected, what their steps say, and what happened on each."""
    yield from joined()


@pytest.fixture
def impatient():
    """Two that do not wait for long."""
    yield from joined(heartbeat_s=0.05, hang_s=0.5)


def joined(**settings):
    with linked(TENSORFLOW, Planner(Fixed((3, 9)), Job(2, 12)), **settings) as pair:
        exchanges, happened, stars = pair
        for exchange, told in zip(exchanges, happened, strict=True):
            exchange.lost_ranks.on_loss = lambda error, told=told: told.append(str(error))
        steps = [TrainingSteps(2, "mean") for _ in exchanges]
        for each, exchange in zip(steps, exchanges, strict=True):
            each.begin(exchange)
        yield exchanges, steps, happened, stars


def train(steps, rank=0):
    """Take a batch and compute its gradients, of which the other worker's are awaited then."""
    plan = steps.next_plan()
    steps.begin_step(plan.batch_size[rank], global_num_samples=12, data_s=0.0)
    steps.begin_forward()
    steps.gradients_done()


def both_train(steps):
    """The first step, measured by both."""
    for rank, each in enumerate(steps):
        train(each, rank)


def session_of(workers):
    return KerasSession(workers, TrainingSteps(2, "mean"), Runtime(), lambda: None)


def test_both_workers_get_the_plan_of_a_step_once_both_have_reported(pair):
    """And not before."""
    exchanges, (first, second), _, _ = pair
    train(first)
    got = []
    waiting = threading.Thread(target=lambda: got.append(first.next_plan()))
    waiting.start()
    assert got == []
    train(second, 1)
    waiting.join(10)

    assert got[0].batch_size == second.next_plan().batch_size == (3, 9)
    assert exchanges[0].decisions.learnt() is not None


def test_a_worker_that_ends_its_run_early_is_named(pair):
    """The others would wait for it in their next collective, which a late report comes after."""
    exchanges, steps, happened, _ = pair
    both_train(steps)
    exchanges[1].close()
    lost = exchanges[0].lost_ranks.verdict(within_s=10)

    assert lost.rank == 1
    assert "Rank 1 on second was lost: it ended its run after step 0" in str(lost)
    assert str(lost) in happened[0]
    with pytest.raises(WorkerLostError):
        steps[0].next_plan()


def test_the_next_step_does_not_begin_without_a_worker_that_ended_its_run(pair):
    """Its collective would hang, and if the report comes after that no rank would say so."""
    exchanges, steps, _, _ = pair
    both_train(steps)
    steps[0].next_plan()
    exchanges[1].close()

    def into_the_next():
        train(steps[0])
        raise exchanges[0].lost_ranks.verdict(within_s=10)

    # Which words, depends on whether the goodbye or the broken collective is heard of first.
    with pytest.raises(WorkerLostError, match=r"after step 0, others (are at 1|had not)"):
        into_the_next()


def test_a_batch_that_no_worker_trains_on_is_no_reason_to_need_one(pair):
    """As where a loop takes one more from its data, and breaks off."""
    exchanges, steps, _, _ = pair
    both_train(steps)
    for each in steps:
        each.next_plan()
    exchanges[1].close()

    assert exchanges[0].lost_ranks.verdict(within_s=0.0) is None
    changed = exchanges[0]._router.changed
    with changed:
        assert changed.wait_for(lambda: exchanges[0].lost_ranks.left, timeout=10)
    assert not exchanges[0].lost_ranks.is_broken


def test_a_known_loss_explains_a_collective_wherever_it_was(pair):
    """In a forward of the user's, say; and whoever hears of it may take its time."""
    (first, _), (steps, _), _, _ = pair
    steps.next_plan()  # and no collective that the balancer knows of
    link = session_of(StrategyWorkers(0, ("first", "second")))
    link._exchange = first
    first.lost(1, "it is gone")
    broken = tf.errors.UnavailableError(None, None, "a port")

    assert link.explain(broken).rank == 1
    assert not first.lost_ranks.in_collective
    assert link.explain(tf.errors.InvalidArgumentError(None, None, "shapes")) is None


def test_an_error_explains_those_that_name_it_alone():
    """Caught and gone by, it is not what breaks a collective later on."""
    link = session_of(StrategyWorkers(0, ("first", "second")))
    mine = ValueError("a row is missing")
    with pytest.raises(ValueError, match="a row"), link.noting():
        raise mine

    assert link.explain(tf.errors.UnknownError(None, None, "ValueError: a row is missing")) is mine
    assert link.explain(tf.errors.UnavailableError(None, None, "a port")) is None


@pytest.mark.parametrize(
    ("rank", "told", "lost"),
    [
        (0, "Error reported from /job:worker/task:1: these tasks are unhealthy", 2),
        (1, "{{node on /job:worker/task:0}} aborted by /job:chief/replica:0/task:0", 0),
        (2, "Deadline Exceeded, RPC: /tensorflow.CoordinationService/Heartbeat", 0),
        (2, "{{node on /job:worker/task:0}} out of memory", None),
        (0, "the peer of /job:chief/task:0 is gone", None),
    ],
)
def test_before_a_run_is_open_tensorflow_says_who_is_gone(rank, told, lost):
    """By the name of a task; what names none but this one is no loss of another's."""
    workers = StrategyWorkers(rank, ("a", "b", "c"), (("chief", 1), ("worker", 2)))
    found = session_of(workers).explain(tf.errors.UnavailableError(None, None, told))

    assert (found and found.rank) == lost


def test_a_broken_connection_ends_the_collective_with_the_name_in_it(pair):
    """So that a training thread comes out of TensorFlow."""
    (first, _), (steps, _), happened, stars = pair
    train(steps)
    stars[1][0].hang_up()
    lost = first.lost_ranks.verdict(within_s=10)

    assert lost is not None
    assert lost.rank == 1
    assert str(lost) in happened[0]


def test_a_worker_that_hangs_while_its_process_lives_is_named(impatient):
    """The chief asks it where it is, and ends the run for all."""
    exchanges, (first, second), happened, _ = impatient
    second.next_plan()
    train(first)
    with pytest.raises(WorkerLostError, match="has not finished step 0") as lost:
        first.next_plan()
    with pytest.raises(WorkerLostError):
        exchanges[1].at(1)

    assert lost.value.rank == 1
    assert "; it is " in str(lost.value)  # where, as it said itself
    assert str(lost.value) in happened[0]
    assert all(exchange.lost_ranks.is_broken for exchange in exchanges)


def test_who_was_told_of_a_loss_may_take_its_time(pair):
    """It may be saving what there is, in TensorFlow's own code."""
    (first, _), (steps, _), _, _ = pair
    ended = []
    lost = first.lost_ranks
    lost._grace_s, lost._abort, lost._is_stuck = -1.0, ended.append, lambda thread_id: True
    train(steps)
    first.lost(1, "it is gone")
    first.tick()
    assert len(set(ended)) == 1  # its own heartbeat may have come as well

    with pytest.raises(WorkerLostError):
        steps.next_plan()
    number = len(ended)
    first.tick()
    assert len(ended) == number


def test_a_thread_that_waits_for_a_graph_is_told_from_one_that_does_not():
    """The first may be stuck with a lost worker; the second comes by to hear of it."""
    own, seen = threading.get_ident(), []

    @tf.function
    def step(x):
        return tf.numpy_function(lambda x: seen.append(TENSORFLOW.is_stuck(own)) or x, [x], x.dtype)

    step(tf.ones(3))

    assert seen == [True]
    assert not TENSORFLOW.is_stuck(own)
    assert "test_steps.py" in TENSORFLOW.place_of(own).text


def tallies(*workers, epochs=1, repeats=True, step_size=7):
    """What each worker says of the last of some epochs, of functions from its number to samples."""
    said = []
    for samples in workers:
        tally = Tally(repeats=repeats)
        for epoch in range(epochs):
            tally.begin()
            every = list(samples(epoch))
            for first in range(0, len(every), step_size):
                step = every[first : first + step_size]
                tally.add(tf.nest.map_structure(lambda *parts: stacked(parts), *step))
        said.append(tally.rows())
    return json.loads(json.dumps(said))


def stacked(parts):
    """As `tf.data` gives them: texts are objects."""
    texts = isinstance(parts[0], (bytes, str))
    return np.array(parts, object) if texts else np.stack(parts)


def in_order(epoch):
    return list(zip(NUMBERS, NUMBERS % 3, strict=True))


def the_other_way(epoch):
    return in_order(epoch)[::-1]


def others(epoch):
    return [(x + 100, y) for x, y in the_other_way(epoch)]


def random(epoch):
    return [(np.random.default_rng().normal(), y) for _, y in in_order(epoch)]


def labelled(samples):
    return lambda epoch: [(x, x, i) for i, (x, _) in enumerate(samples(epoch))]


def others_labelled(epoch):
    return labelled(random)(epoch)[::-1]


NUMBERS = np.arange(20)


@pytest.mark.parametrize(
    ("workers", "options", "said"),
    [
        ([in_order, in_order, the_other_way], {}, r"another order on ranks 0, 1 \| rank 2"),
        ([in_order, the_other_way, others], {}, r"another order on rank 0 \| rank 1 \| rank 2"),
        ([in_order, others], {"epochs": 2}, r"other samples on rank 0 \| rank 1"),
        ([in_order, others], {}, None),  # nobody knows yet that they are no augmentation
        ([in_order, others], {"epochs": 2, "repeats": False}, None),  # a cached one, perhaps
        ([in_order, in_order], {"epochs": 2}, None),
        ([random, random], {"epochs": 2}, None),
        ([random, in_order], {"epochs": 2}, None),
        ([labelled(random), labelled(the_other_way)], {"epochs": 2}, None),
        ([labelled(random), others_labelled], {}, r"another order on rank 0 \| rank 1"),
        ([lambda epoch: [0] * 9 + [1], lambda epoch: [1] + [0] * 9], {}, None),
    ],
)
def test_what_is_certain_is_refused_and_nothing_else(workers, options, said):
    """The same values in another order, or values that come again and others do not have."""
    if said is None:
        check_same_samples(tallies(*workers, **options))
    else:
        with pytest.raises(ValueError, match=said):
            check_same_samples(tallies(*workers, **options))


def test_the_size_of_steps_says_nothing():
    """Checksums are those of the samples, however they were stacked."""
    assert tallies(in_order, step_size=3) == tallies(in_order, step_size=20)


@pytest.mark.parametrize(
    "sample",
    [(b"text", "text"), {"large": np.ones((64, 64, 3)), "small": np.float32(1)}, np.zeros(0)],
)
def test_all_kinds_of_samples_have_checksums(sample):
    """Texts, large ones and empty ones, the same for the same."""
    (first,), (again,) = tallies(lambda epoch: [sample]), tallies(lambda epoch: [sample])

    assert first == again
