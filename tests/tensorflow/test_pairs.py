"""What two workers say to each other, and who is named when one of them is gone."""

from __future__ import annotations

import threading

import pytest
import tensorflow as tf

from evenstep._planner import Job, Planner
from evenstep.exceptions import WorkerLostError
from evenstep.policies import Fixed
from evenstep.tensorflow._keras_session import KerasSession
from evenstep.tensorflow._strategy_workers import TENSORFLOW, StrategyWorkers
from evenstep.tensorflow._training_steps import TrainingSteps

from ..exchange.exchanges import linked


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
    return KerasSession(workers, TrainingSteps(2, "mean"), lambda: None)


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
    assert not first.lost_ranks.watch.in_collective
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
    first.lost_ranks.watch = type(first.lost_ranks.watch)(
        grace_s=-1.0, abort=ended.append, is_stuck=lambda thread_id: True
    )
    first.lost_ranks.leave_collective = first.lost_ranks.watch.leave_collective
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
    assert "test_pairs.py" in TENSORFLOW.place_of(own).text
