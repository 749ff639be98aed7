"""Cases of `fit`: what comes out, and what Keras says of it."""

import contextlib
import io

import keras
import numpy as np
import tensorflow as tf
from common import BATCH_SIZE, STRATEGY, balancer, case, compiled, data, named, told, weights

from evenstep.watch import KerasWatch


@case
def fit():
    """55 steps under plans that change at every one; and what Keras says of them."""
    events = []
    with balancer(events) as made:
        trained = made.prepare(compiled())
        dataset = made.dataset(data(), shuffle=True, seed=3)
        history = trained.fit(
            dataset, epochs=5, shuffle=False, verbose=0, callbacks=[made.callback()]
        )
        judged = trained.evaluate(*data(), batch_size=BATCH_SIZE, verbose=0)
        position = {key: made.state_dict()[key] for key in ("epoch", "step", "num_steps")}
    return {
        "weights": weights(trained),
        "history": told(history),
        "evaluated": list(map(float, judged)),
        "cardinality": int(of_epoch() if callable(of_epoch := dataset.cardinality) else of_epoch),
        "position": position,
        "sizes": [list(event.batch_size) for event in named(events, "StepMeasured")],
        "rejected": len(named(events, "MeasurementRejected")),
    }


@case
def arrays():
    """Arrays in `fit`, the last quarter to judge by, and again: as plain Keras has them."""
    x, y = data()
    weight = 1 + np.arange(len(x)) / len(x)
    settings = {"epochs": 3, "batch_size": BATCH_SIZE, "verbose": 0, "sample_weight": weight}
    settings |= {"validation_split": 0.25, "shuffle": False}
    if STRATEGY.num_replicas_in_sync == 1:  # plain Keras, without evenstep
        trained = compiled()
        histories = [trained.fit(x, y, **settings) for _ in range(2)]
    else:
        with balancer() as made:
            trained = made.prepare(compiled())
            histories = [trained.fit(x, y, **settings) for _ in range(2)]
    history = {
        f"{name}, fit {n}": v for n, h in enumerate(histories) for name, v in told(h).items()
    }
    return {"weights": weights(trained), "history": history}


@case
def arrays_shuffled():
    """Shuffled, as is the default: on any number of workers alike, whose steps are the same."""
    with balancer() as made:
        trained = made.prepare(compiled())
        x, y = data()
        history = trained.fit(x, y, epochs=2, verbose=0, validation_data=data(24))
    return {"weights": weights(trained), "history": told(history)}


@case
def fit_sum():
    """The same with a loss that is a sum."""
    with balancer(loss_reduction="sum") as made:
        loss = keras.losses.MeanSquaredError(reduction="sum")
        trained = made.prepare(compiled(loss=loss))
        with STRATEGY.scope():
            trained.optimizer.learning_rate.assign(0.002)
        history = trained.fit(made.dataset(data()), epochs=1, shuffle=False, verbose=0)
        judged = trained.evaluate(*data(), batch_size=BATCH_SIZE, verbose=0)
    with balancer(loss_reduction="sum") as made:
        with STRATEGY.scope():  # Keras adds no regularizer to losses of each sample
            kept = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            loss = keras.losses.MeanSquaredError(reduction="none")
            kept.compile(keras.optimizers.SGD(0.002), loss)
        kept = made.prepare(kept)
        of_each = kept.fit(made.dataset(data()), epochs=1, shuffle=False, verbose=0)
    return {
        "weights": weights(trained) + weights(kept),
        "history": {**told(history), "mean of each": of_each.history["loss"]},
        "evaluated": list(map(float, judged)),
    }


@case
def again():
    """One model by two balancers, the second after the first was closed; and validation."""
    trained = compiled()
    for _ in range(2):
        with balancer() as made:
            trained = made.prepare(trained)
            history = trained.fit(
                made.dataset(data()),
                epochs=1,
                shuffle=False,
                verbose=0,
                validation_data=data(24),
                validation_batch_size=BATCH_SIZE,
            )
    return {
        "weights": weights(trained),
        "history": told(history),
    }


@case
def watched():
    """Two fits of a balanced model beside a `KerasWatch`, and what that says of them."""
    events = []
    with balancer(events) as made, contextlib.redirect_stderr(io.StringIO()) as said:
        trained = made.prepare(compiled())
        dataset = made.dataset(data())
        for _ in range(2):
            trained.fit(dataset, shuffle=False, verbose=0, callbacks=[KerasWatch(every_s=0)])
    return {
        "weights": weights(trained),
        "said": said.getvalue(),
        "measured": len(named(events, "StepMeasured")),
    }


def largest(y_true, y_pred):
    """A number for a batch, which counts as many times as it has samples."""
    return tf.reduce_mean(y_pred)


class Most(keras.metrics.Metric):
    """The number of updates, which is no sum over workers: all of them make as many."""

    def __init__(self, name="updates", **options):
        super().__init__(name=name, **options)
        self.number = self.add_variable((), "zeros", aggregation="mean", name="number")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.number.assign_add(1)

    def result(self):
        return self.number


@case
def outputs():
    """Two outputs with a loss and metrics each, of samples that weigh unlike."""
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        x = keras.Input((4,))
        parts = {name: keras.layers.Dense(1, name=name)(x) for name in ("first", "second")}
        trained = keras.Model(x, parts)
        trained.compile(
            keras.optimizers.SGD(0.05),
            loss={"first": "mse", "second": "mae"},
            loss_weights={"first": 1.0, "second": 0.5},
            metrics={"first": [Most(), largest]},
            weighted_metrics={"second": ["mse"]},
        )
    x, y = data(10 * BATCH_SIZE)
    with balancer() as made:
        trained = made.prepare(trained)
        dataset = made.dataset((x, {"first": y, "second": -y}, np.abs(x[:, 0])))
        steps = []
        kept = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: steps.append(dict(logs))
        )
        history = trained.fit(dataset, shuffle=False, verbose=0, callbacks=[kept])
    by_step = {f"{name} by step": [float(step[name]) for step in steps] for name in steps[0]}
    return {
        "weights": weights(trained),
        "history": {**told(history), **by_step},
    }


@case
def class_weight():
    """Classes that count unlike, which Keras turns into weights of samples."""
    x, y = data()
    classes = (y[:, 0] > 0).astype(int) + (y[:, 0] > 1)
    with STRATEGY.scope():
        keras.utils.set_random_seed(0)
        trained = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        trained.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
        )
    settings = {"epochs": 5, "shuffle": False, "verbose": 0, "class_weight": {0: 0.3, 2: 4.0}}
    if STRATEGY.num_replicas_in_sync == 1:  # plain Keras, without evenstep
        batches = tf.data.Dataset.from_tensor_slices((x, classes)).batch(BATCH_SIZE)
        history = trained.fit(batches, **settings)
    else:
        with balancer() as made:
            trained = made.prepare(trained)
            dataset = made.dataset((x, classes))
            history = trained.fit(dataset, callbacks=[made.callback()], **settings)
    return {"weights": weights(trained), "history": told(history)}


class OwnStep(keras.Model):
    """A training step as Keras' guide writes one, with a mean of its own and a number."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.seen = keras.metrics.Mean(name="seen")
        self.lost = keras.metrics.Mean(name="lost")

    def call(self, x):
        return self.dense(x)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, trainable_variables=self.trainable_variables)
        self.seen.update_state(tf.reduce_mean(x))
        self.lost.update_state(loss)
        means = {"seen": self.seen.result(), "lost": self.lost.result()}
        return {**means, "loss": loss, "target": tf.reduce_mean(y)}


class NoLoss(OwnStep):
    """A step that needs no compiled loss."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            each = tf.reduce_sum((self(x, training=True) - y) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(each)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"each": tf.reduce_mean(each)}


@case
def own_step():
    """What a step of the user's returns is that of the global batch."""
    found = {"weights": [], "history": {}}
    for kind, loss in (OwnStep, "mse"), (NoLoss, None):
        with STRATEGY.scope():
            trained = kind()
            trained.compile(keras.optimizers.SGD(0.05), loss=loss)
        with balancer() as made:
            trained = made.prepare(trained)
            dataset = made.dataset(data(10 * BATCH_SIZE))
            history = trained.fit(dataset, shuffle=False, verbose=0)
        found["weights"] += weights(trained)
        found["history"] |= told(history)
    return found


class Pulled(keras.layers.Layer):
    """Pulls what passes through it to zero, by a loss that no output shows."""

    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2))
        return x


@case
def added():
    """A loss that a layer adds; and compiled outside of the scope, as Keras lets it be."""
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        layers = (keras.layers.Dense(8), Pulled(), keras.layers.Dense(1))
        trained = keras.Sequential([keras.Input((4,)), *layers])
    trained.compile(keras.optimizers.SGD(0.05), "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    with balancer() as made:
        trained = made.prepare(trained)
        dataset = made.dataset(data())
        history = trained.fit(dataset, epochs=2, shuffle=False, verbose=0)
        judged = trained.evaluate(*data(), batch_size=BATCH_SIZE, verbose=0)
    return {
        "weights": weights(trained),
        "history": told(history),
        "evaluated": list(map(float, judged)),
    }
