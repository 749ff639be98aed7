"""The parts of the adapter that need no cluster: sources, positions, settings, state."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

from evenstep._planner import Job, Plan, Planner, Report
from evenstep.policies import Fixed
from evenstep.tensorflow import Runtime
from evenstep.tensorflow._dataset import (
    Batches,
    Estimates,
    Kept,
    StateInCheckpoint,
)
from evenstep.tensorflow._keras_checks import check_optimizer, guard_losses
from evenstep.tensorflow._source import source_of
from evenstep.tensorflow._strategy_workers import StrategyWorkers, workers_of

ROWS = np.arange(10.0)


def batches(source, session, *, rank=0, size=4, **options):
    return Batches(
        source_of(source, shuffle=False, seed=0),
        session,
        StrategyWorkers(rank, ("a", "b")),
        global_batch_size=size,
        **options,
    )


class Planned:
    """A session and its steps, with two workers' plans: other ones at every step."""

    def __init__(self, plans=None, compare=None):
        self.plans = itertools.repeat(Plan(0, 0, (4, 0), tail=(2, 0))) if plans is None else plans
        self.compare = compare or (lambda rows: None)
        self.is_under_way = False
        self.steps = self

    def open(self):
        return self

    def noting(self):
        return nullcontext()

    def next_plan(self):
        return next(self.plans)

    def begin_step(self, num_samples, *, global_num_samples, data_s):
        pass

    def end_epoch(self):
        pass


def plans():
    return (Plan(n, 0, sizes, tail=(1, 1)) for n, sizes in enumerate([(2, 2), (1, 3), (3, 1)]))


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


@pytest.mark.parametrize("shape", [(), (3,), (20_000,)], ids=["small", "rows", "large"])
@pytest.mark.parametrize("first", [0, 5, 35])
def test_a_pipeline_is_cut_as_its_rows_are(shape, first):
    """Small samples are read several steps at once, also from the middle of an epoch."""
    rows = np.arange(53, dtype=np.float32).reshape(-1, *[1] * len(shape)) + np.zeros(shape, "f4")
    source = source_of(tf.data.Dataset.from_tensor_slices(rows), shuffle=False, seed=0)
    source.begin(0, first, num_samples=5)

    for at in range(first, 53, 5):
        slots = np.arange(at % 2, min(5, 53 - at), 2)
        assert np.array_equal(source.take(slots), rows[at + slots])
        if shape == (20_000,):  # no step of large samples stays in memory while it is trained on
            assert not any(isinstance(kept, np.ndarray) for kept in vars(source).values())
    source.end()


def test_a_worker_without_samples_gets_no_rows():
    """Of the right shape and type, so that the graph runs on them."""
    pipeline = tf.data.Dataset.from_tensor_slices(np.ones((4, 2), np.float32))
    (batch,) = batches(pipeline, Planned(), rank=1)()

    assert batch.shape == (0, 2)
    assert batch.dtype == np.float32


def test_texts_come_out_as_they_were_put_in():
    """Of any length, and with zeros at the end."""
    texts = [b"a", b"bb\0", b"", b"ccc"]
    pipeline = tf.data.Dataset.from_tensor_slices(texts)
    batch, *_ = batches(pipeline, Planned(plans()), rank=0)()
    other, *_ = batches(pipeline, Planned(plans()), rank=1)()

    assert sorted([*batch, *other]) == sorted(texts)


def test_the_position_is_what_is_trained_on():
    """A batch that was handed out and not trained on is handed out again."""
    alone = Planned()
    made = batches(ROWS, alone)
    iterator = made()
    next(iterator)
    assert made.position == (0, 1)

    alone.is_under_way = True
    assert made.position == (0, 0)

    alone.is_under_way = False
    list(iterator)
    assert made.position == (1, 0)


def test_a_place_within_an_epoch_is_one_of_that_epochs_form():
    """In other steps, or another order, some samples would count twice and others never."""
    made = batches(ROWS, Planned())
    others = (
        batches(ROWS, Planned(), size=5),
        batches(ROWS[:9], Planned()),
        batches(tf.data.Dataset.from_tensor_slices(ROWS), Planned()),
    )
    for other in others:
        made.go_to((2, 0), other.form)  # the beginning of an epoch fits all
    made.go_to((2, 1), made.form)
    for other in others:
        with pytest.raises(ValueError, match="a place within an epoch"):
            made.go_to((2, 1), other.form)

    assert made.position == (2, 1)


def test_a_function_is_held_to_what_it_returned_first():
    """Of another length, or in batches, later on."""
    rows = tf.data.Dataset.from_tensor_slices(ROWS)
    for later, words in ((rows.take(7), "7 for epoch 1"), (rows.batch(2), "one that makes batch")):
        source = source_of(
            lambda epoch, later=later: later if epoch else rows, shuffle=False, seed=0
        )
        source.begin(0, 0, num_samples=5)
        with pytest.raises(ValueError, match=words):
            source.begin(1, 0, num_samples=5)


def test_an_epoch_is_compared_whole_before_its_last_batch():
    """What `drop_remainder` leaves out is read too: the rest would be no whole epoch's."""
    compared = []
    pipeline = tf.data.Dataset.from_tensor_slices(ROWS)
    made = batches(pipeline, Planned(plans(), compared.append), drop_remainder=True)
    iterator = made()
    next(iterator)
    assert not compared
    next(iterator)
    made = batches(pipeline.shuffle(10, seed=1), Planned(plans(), compared.append))
    list(made())

    (kept,), (shuffled,) = compared
    assert kept[0] != shuffled[0]  # in order
    assert kept[1:] == shuffled[1:]


@pytest.mark.parametrize("part", ["evaluator", "ps"])
def test_a_process_with_another_part_makes_no_balancer(monkeypatch, part):
    """It would train, or wait for ever."""
    cluster = {"worker": ["a:1", "b:2"], part: ["c:3"]}
    task = {"type": part, "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(ValueError, match="'chief' or 'worker'"):
        workers_of(tf.distribute.get_strategy())


def test_the_switch_of_pytorch_is_refused(monkeypatch):
    """Or a script would be balanced that somebody has switched off."""
    monkeypatch.setenv("EVENSTEP", "off")
    with pytest.raises(ValueError, match="`EVENSTEP` must be left out with TensorFlow"):
        workers_of(tf.distribute.get_strategy())


@pytest.mark.parametrize("source", [ROWS, tf.data.Dataset.from_tensor_slices(ROWS)])
def test_an_epoch_goes_on_only_where_that_was_asked_for(source):
    """`fit` names every epoch; the one that a checkpoint was in begins in its middle."""
    made = batches(source, Planned())
    made.go_to((3, 1))
    made.begin_epoch(3)
    assert [batch.tolist() for batch in made()] == [[4, 5, 6, 7], [8, 9]]

    made.begin_epoch(7)
    assert made.position == (7, 0)


def test_an_epoch_that_could_not_begin_is_not_passed_over():
    """Opening a run may fail, and be tried again."""
    session = Planned()
    session.open = lambda: 1 / 0
    made = batches(ROWS, session)
    with pytest.raises(ZeroDivisionError):
        next(made())

    assert made.position == (0, 0)


def test_other_samples_are_told_apart():
    """By a few rows, their types, and the seeds of a pipeline, without reading them all."""
    arrays = [source_of(rows, shuffle=False, seed=0) for rows in (ROWS, ROWS.copy(), ROWS + 1)]
    rows = tf.data.Dataset.from_tensor_slices(ROWS)
    orders = [
        source_of(rows.shuffle(5, seed=seed).prefetch(1), shuffle=False, seed=0).order
        for seed in (1, 1, 2)
    ]

    assert arrays[0].content == arrays[1].content != arrays[2].content
    assert orders[0] == orders[1] != orders[2]


def test_orders_are_drawn_by_seed_and_epoch():
    """The same again for the same two, others for others."""
    drawn = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0)):
        source = source_of(ROWS, shuffle=True, seed=seed)
        source.begin(epoch, 0, num_samples=10)
        again = source.take(np.arange(10)).tolist()
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
    kept, found = Kept((2, 5), 27, "as it was", Estimates(("a", "b"), planner.learnt())), []
    StateInCheckpoint(dict, found.append).deserialize(
        StateInCheckpoint(kept.state_dict, found.append).serialize()
    )
    state, again = found[0], Kept.read(found[0])
    estimates = again.estimates

    assert (again.position, again.num_steps, again.form) == ((2, 5), 27, "as it was")
    assert estimates.apply(Planner(Fixed((3, 9)), Job(2, 12)), ("a", "b")).policy == "resumed"
    fewer = {"estimates": {**state["estimates"], "workers": ["a"]}}
    for broken in (
        {**state, "step": -1},
        {**state, "estimates": fewer},
        {**state, "form": None},
        3,
    ):
        with pytest.raises(ValueError, match=r"come from `Balancer.state_dict\(\)`"):
            Kept.read(broken)


@pytest.mark.parametrize(
    "wrong",
    [
        {"heartbeat_s": 30.0},
        {"heartbeat_s": 0},
        {"line_every": 0},
        {"hang_s": 2.0},
        {"meeting_s": 0},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    """By name."""
    with pytest.raises(ValueError, match=rf"Runtime\({next(iter(wrong))}=...\)"):
        Runtime(**wrong)


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
    guard_losses(model, "mean")
    model.compute_loss(*batch, y_pred=model(batch[0]))
    model.compile("sgd", lambda y, p: tf.reduce_mean((y - p) ** 2))
    model._symbolic_build(data_batch=batch)
    guard_losses(model, "mean")

    with pytest.raises(ValueError, match="return a value for each sample"):
        model.compute_loss(*batch, y_pred=model(batch[0]))


def test_a_mean_over_what_is_not_ignored_is_refused():
    """Workers ignore unlike shares of their values, so means would weigh unlike; sums pass."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
    batch = tf.ones((3, 2)), tf.constant([[0], [2], [-1]])
    for reduction in ("sum", "mean"):
        named = "sum_over_batch_size" if reduction == "mean" else reduction
        loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1, reduction=named)
        model.compile("sgd", loss)
        model._symbolic_build(data_batch=batch)
        guard_losses(model, reduction)
        if reduction == "sum":
            model.compute_loss(*batch, y_pred=model(batch[0]))

    with pytest.raises(ValueError, match="be a mean over all values"):
        model.compute_loss(*batch, y_pred=model(batch[0]))
