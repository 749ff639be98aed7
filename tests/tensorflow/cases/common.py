"""What every case of a worker's uses: a strategy, a small model, data, a loop of the user's."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from evenstep import Decision
from evenstep.policies import AbstractPolicy
from evenstep.tensorflow import Balancer, Runtime

FOLDER = Path(sys.argv[1])
TASK = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
NUM_SAMPLES, BATCH_SIZE = 122, 12  # the short last batch has 2 samples, fewer than workers
CASES = {}

keras.backend.set_floatx("float64")
STRATEGY = (
    tf.distribute.MultiWorkerMirroredStrategy()
    if "TF_CONFIG" in os.environ
    else tf.distribute.get_strategy()
)


def case(function):
    CASES[function.__name__] = function
    return function


@dataclass(frozen=True)
class Swing(AbstractPolicy):
    """Other sizes at every step, drawn by its number."""

    def init(self, cluster):
        return self.draw(cluster, 0)

    def update(self, cluster, timings, state):
        return self.draw(cluster, state + 1)

    def draw(self, cluster, number):
        return Decision(sizes(number, cluster.global_batch_size), number, "swinging")


def sizes(number, total, world_size=3):
    cuts = np.random.default_rng(number).choice(np.arange(1, total), world_size - 1, replace=False)
    return np.diff([0, *np.sort(cuts), total])


def data(num_samples=NUM_SAMPLES):
    x = np.random.default_rng(0).normal(size=(num_samples, 4))
    x[:, 0] = np.arange(num_samples) / num_samples
    return x, x.sum(axis=1, keepdims=True) + x[:, :1] ** 2


def model():
    keras.utils.set_random_seed(0)
    with STRATEGY.scope():
        return keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.01)),
                keras.layers.Dense(1),
            ]
        )


def compiled(**options):
    made = model()
    with STRATEGY.scope():
        settings = {"loss": "mse", "metrics": ["mae"], **options}
        made.compile(keras.optimizers.SGD(0.05, momentum=0.9), **settings)
    return made


def balancer(events=None, batch_size=BATCH_SIZE, **options):
    hooks = () if events is None else (events.append,)
    runtime = Runtime(line_every=None, hooks=hooks, deadline_s=30, heartbeat_s=0.5)
    return Balancer(STRATEGY, batch_size, **{"policy": Swing(), "runtime": runtime, **options})


def weights(trained):
    return [float(value) for part in trained.trainable_variables for value in part.numpy().ravel()]


def local(value):
    """What this worker got."""
    return STRATEGY.experimental_local_results(value)[0].numpy()


def ids(batch, num_samples=NUM_SAMPLES):
    return np.rint(local(batch[0])[:, 0] * num_samples).astype(int).tolist()


def named(events, kind):
    return [event for event in events if type(event).__name__ == kind]


def stepper(trained, optimizer, dataset, traces):
    """A training step as a user writes it, on batches of any size."""

    def on_replica(batch):
        traces.append(1)
        x, y = batch
        with tf.GradientTape() as tape:
            each = tf.reduce_sum((trained(x, training=True) - y) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(each)
        gradients = tape.gradient(loss, trained.trainable_variables)
        optimizer.apply_gradients(zip(gradients, trained.trainable_variables, strict=True))

    @tf.function(input_signature=[dataset.element_spec])
    def step(batch):
        STRATEGY.run(on_replica, args=(batch,))

    return step


def custom(made, events, *, num_epochs, stop_after=None, restore=None, **options):
    """Train in a loop of the user's; return the model, and the ids that this worker got."""
    with made:
        trained = model()
        with STRATEGY.scope():
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
            optimizer.build(trained.trainable_variables)
        trained, optimizer = made.prepare(trained, optimizer)
        dataset = made.dataset(options.pop("source", None) or data(), **options)
        if restore is not None:
            tf.train.Checkpoint(balancer=made.trackable()).restore(str(restore)).expect_partial()
        traces, got = [], []
        step = stepper(trained, optimizer, dataset, traces)
        for _ in range(num_epochs):
            for batch in dataset:
                got.append(ids(batch))
                step(batch)
                if len(got) == stop_after:
                    state = tf.train.Checkpoint(balancer=made.trackable())
                    path = state.write(str(FOLDER / f"state{TASK}"))
                    return trained, got, traces, path
    return trained, got, traces, None


def told(history):
    """What Keras said of every epoch."""
    return {name: list(map(float, values)) for name, values in history.history.items()}
