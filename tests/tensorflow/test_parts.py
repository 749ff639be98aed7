"""The parts of the adapter that need no cluster: sources, positions, settings, state."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from evenstep.control import Job, Plan, Planner, Report
from evenstep.policies import Fixed
from evenstep.tensorflow import Runtime
from evenstep.tensorflow._alone import Alone
from evenstep.tensorflow._dataset import Batches, Position
from evenstep.tensorflow._estimates import Kept, as_text, from_text
from evenstep.tensorflow._fit import _check_losses, check_optimizer
from evenstep.tensorflow._machine import MachineReader
from evenstep.tensorflow._source import source_of

ROWS = np.arange(10.0)


def batches(source, conducted, *, rank=0, size=4):
    return Batches(
        source_of(source, shuffle=False, seed=0),
        rank=rank,
        world_size=2,
        global_batch_size=size,
        drop_remainder=False,
        conductor=lambda: conducted,
    )


class Planned(Alone):
    """Two workers' plans, other ones at every step."""

    def __init__(self, plans):
        Alone.__init__(self, 4, 2, first_step=0)
        self.plans = iter(plans)

    def next_plan(self):
        return next(self.plans)


def plans():
    return [Plan(n, 0, sizes, tail=(1, 1)) for n, sizes in enumerate([(2, 2), (1, 3), (3, 1)])]


@pytest.mark.parametrize(
    "source",
    [
        (ROWS, {"b": ROWS + 0.5}),
        tf.data.Dataset.from_tensor_slices((ROWS, {"b": ROWS + 0.5})),
        lambda epoch: tf.data.Dataset.from_tensor_slices((ROWS, {"b": ROWS + 0.5})),
    ],
    ids=["arrays", "pipeline", "function"],
)
def test_steps_have_their_samples_whatever_the_plan(source):
    """Each on one worker, the short last step included, from every kind of source."""
    per_worker = [list(batches(source, Planned(plans()), rank=rank)()) for rank in range(2)]
    steps = [sorted([*first[0], *second[0]]) for first, second in zip(*per_worker, strict=True)]

    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(first[0]) for first in per_worker[0]] == [2, 1, 1]
    assert all(np.array_equal(x + 0.5, rest["b"]) for x, rest in per_worker[0])


def test_a_worker_without_samples_gets_no_rows():
    """Of the right shape and type, so that the graph runs on them."""
    pipeline = tf.data.Dataset.from_tensor_slices(np.ones((4, 2), np.float32))
    empty = [Plan(0, 0, (4, 0))]
    (batch,) = batches(pipeline, Planned(empty), rank=1)()

    assert batch.shape == (0, 2)
    assert batch.dtype == np.float32


def test_the_position_is_what_is_trained_on():
    """A batch that was handed out and not trained on is handed out again."""
    alone = Alone(4, 2, first_step=0)
    made = batches(ROWS, alone)
    iterator = made()
    next(iterator)
    assert made.position == Position(0, 1)

    alone.is_under_way = True
    assert made.position == Position(0, 0)

    alone.is_under_way = False
    list(iterator)
    assert made.position == Position(1, 0)


def test_an_epoch_goes_on_only_where_that_was_asked_for():
    """`fit` names every epoch; the one that a checkpoint was in begins in its middle."""
    made = batches(ROWS, Alone(4, 2, first_step=0))
    made.go_to(Position(3, 1))
    made.begin_epoch(3)
    assert [batch.tolist() for batch in made()] == [[4, 5, 6, 7], [8, 9]]

    made.begin_epoch(7)
    assert made.position == Position(7, 0)


def test_orders_are_drawn_by_seed_and_epoch():
    """The same again for the same two, others for others."""
    drawn = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0)):
        source = source_of(ROWS, shuffle=True, seed=seed)
        source.begin(epoch, 0)
        again = source.take(10, np.arange(10)).tolist()
        assert drawn.setdefault((seed, epoch), again) == again
        assert sorted(again) == ROWS.tolist()
    assert len(set(map(tuple, drawn.values()))) == 3


def test_a_pipeline_that_every_worker_shuffles_by_itself_is_refused():
    """Some samples would be trained on twice, others never."""
    rows = tf.data.Dataset.from_tensor_slices(ROWS)
    with pytest.raises(ValueError, match="shuffled alike on all workers"):
        source_of(rows.shuffle(9).map(lambda row: row), shuffle=False, seed=0)

    assert source_of(rows.shuffle(9, seed=0), shuffle=False, seed=0).num_samples == 10


def test_a_state_is_read_back_as_it_was():
    """Arrays, tuples and all, through a text; anything else is refused."""
    planner = Planner(Fixed((3, 9)), Job(2, 12))
    reports = [Report(n, size, 12, 0.5 * size, 0.0) for n in range(3) for size in (3, 9)]
    for n in range(3):
        planner.observe(reports[2 * n : 2 * n + 2], next_step=n + 1)
    state = Kept(Position(2, 5), 27, ("a", "b"), planner.learnt()).state_dict()
    again = Kept.read(from_text(as_text(state)))

    assert (again.position, again.num_steps, again.workers) == (Position(2, 5), 27, ("a", "b"))
    assert again.apply(Planner(Fixed((3, 9)), Job(2, 12)), ("a", "b")).policy == "resumed"
    for broken in ({**state, "step": -1}, {**state, "workers": ["a"]}, {**state, "format": "x"}, 3):
        with pytest.raises(ValueError, match=r"come from `Balancer.state_dict\(\)`"):
            Kept.read(broken)


@pytest.mark.parametrize("wrong", [{"heartbeat_s": 30.0}, {"heartbeat_s": 0}, {"line_every": 0}])
def test_settings_out_of_range_are_refused(wrong):
    """By name."""
    with pytest.raises(ValueError, match=rf"Runtime\({next(iter(wrong))}=...\)"):
        Runtime(**wrong)


def test_the_machine_is_read_where_somebody_asks():
    """A share in [0, 1] and bytes; else nothing."""
    free_cpu, free_memory_bytes = MachineReader(asked=True).read()

    assert 0 <= free_cpu <= 1
    assert free_memory_bytes > 0
    assert MachineReader(asked=False).read() == (None, 0)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "scale no losses"),
        (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), "in every step, got"),
        (object, "be a `keras.optimizers.Optimizer`"),
    ],
)
def test_optimizers_that_would_hang_or_sum_otherwise_are_refused(optimizer, words):
    """By name, before training."""
    with pytest.raises(ValueError, match=words):
        check_optimizer(optimizer())


def test_a_loss_that_is_a_single_number_is_refused():
    """Keras leaves it as it is, so that means of workers would be added up; others pass."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    batch = tf.ones((3, 2)), tf.ones((3, 1))
    model.compile("sgd", lambda y, p: (y - p) ** 2)
    model._symbolic_build(data_batch=batch)
    _check_losses(model, "mean")
    model.compute_loss(*batch, y_pred=model(batch[0]))
    model.compile("sgd", lambda y, p: tf.reduce_mean((y - p) ** 2))
    model._symbolic_build(data_batch=batch)
    _check_losses(model, "mean")

    with pytest.raises(ValueError, match="return a value for each sample"):
        model.compute_loss(*batch, y_pred=model(batch[0]))
