"""Cases of `fit`: what comes out, and what Keras says of it."""

import keras
import numpy as np
import tensorflow as tf
from common import BATCH_SIZE, STRATEGY, balancer, case, compiled, data, named, told, weights


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
def fit_sum():
    """The same with a loss that is a sum."""
    with balancer(loss_reduction="sum") as made:
        loss = keras.losses.MeanSquaredError(reduction="sum")
        trained = made.prepare(compiled(loss=loss))
        with STRATEGY.scope():
            trained.optimizer.learning_rate.assign(0.002)
        history = trained.fit(made.dataset(data()), epochs=1, shuffle=False, verbose=0)
        judged = trained.evaluate(*data(), batch_size=BATCH_SIZE, verbose=0)
    return {
        "weights": weights(trained),
        "history": told(history),
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
            metrics={"first": [Most()]},
            weighted_metrics={"second": ["mse"]},
        )
    x, y = data(10 * BATCH_SIZE)
    with balancer() as made:
        trained = made.prepare(trained)
        dataset = made.dataset((x, {"first": y, "second": -y}, np.abs(x[:, 0])))
        history = trained.fit(dataset, shuffle=False, verbose=0)
    return {
        "weights": weights(trained),
        "history": told(history),
    }


class OwnStep(keras.Model):
    """A training step as Keras' guide writes one, with a mean of its own and a number."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        return self.dense(x)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.seen.update_state(tf.reduce_mean(x))
        return {"seen": self.seen.result(), "largest": tf.reduce_mean(y)}


@case
def own_step():
    """What a step of the user's returns is that of the global batch."""
    with STRATEGY.scope():
        trained = OwnStep()
        trained.compile(keras.optimizers.SGD(0.05), loss="mse")
    with balancer() as made:
        trained = made.prepare(trained)
        dataset = made.dataset(data(10 * BATCH_SIZE))
        history = trained.fit(dataset, shuffle=False, verbose=0)
    return {
        "weights": weights(trained),
        "history": told(history),
    }
