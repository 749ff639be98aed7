"""One worker: runs the cases it is told to, and writes what came of each to a file of its own.

python worker.py FOLDER CASE...
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from evenstep import Decision
from evenstep.exceptions import WorkerLostError
from evenstep.policies import AbstractPolicy
from evenstep.tensorflow import Balancer, Runtime

FOLDER = Path(sys.argv[1])
TASK = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
NUM_SAMPLES, BATCH_SIZE = 122, 12  # the short last batch has 2 samples, fewer than workers
CASES = {}


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


@case
def fit():
    """55 steps under plans that change at every one; and what Keras says of them."""
    events = []
    with balancer(events) as made:
        trained = made.prepare(compiled())
        dataset = made.dataset(data(), shuffle=True, seed=3)
        history = trained.fit(
            dataset, epochs=5, shuffle=False, verbose=0, callbacks=[made.callback()]
        ).history
        judged = trained.evaluate(*data(), batch_size=BATCH_SIZE, verbose=0)
        position = {key: made.state_dict()[key] for key in ("epoch", "step", "num_steps")}
    return {
        "weights": weights(trained),
        "history": {name: list(map(float, values)) for name, values in history.items()},
        "evaluated": list(map(float, judged)),
        "cardinality": int(dataset.cardinality) if STRATEGY.num_replicas_in_sync > 1 else 11,
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
        trained.fit(made.dataset(data()), epochs=1, shuffle=False, verbose=0)
    return {"weights": weights(trained)}


@case
def loop():
    """55 steps in a loop of the user's."""
    events = []
    trained, got, traces, _ = custom(balancer(events), events, num_epochs=5, shuffle=True)
    return {"weights": weights(trained), "ids": got, "traces": len(traces)}


@case
def many_sizes():
    """200 steps with more than 50 sizes."""
    events = []
    made = balancer(events, batch_size=90)
    _, got, traces, _ = custom(made, events, num_epochs=1, source=data(200 * 90))
    seen = {len(batch) for batch in got}
    return {"traces": len(traces), "num_steps": len(got), "num_sizes": len(seen)}


@case
def pipeline():
    """A pipeline of samples, mapped after they are shared out."""
    mapped = []

    def count(x):
        mapped.append(1)
        return x

    def map_fn(x, y):
        counted = tf.numpy_function(count, [x], tf.float64)
        counted.set_shape(x.shape)
        return counted, 2 * y

    def source(epoch):
        return tf.data.Dataset.from_tensor_slices(data()).shuffle(NUM_SAMPLES, seed=epoch)

    trained, got, _, _ = custom(balancer(), [], num_epochs=2, source=source, map_fn=map_fn)
    return {"ids": got, "num_mapped": len(mapped), "weights": weights(trained)}


@case
def resume():
    """Stopped within an epoch, and gone on with from a checkpoint."""
    events = []
    _, before, _, path = custom(balancer(), [], num_epochs=1, stop_after=4, shuffle=True)
    _, after, _, _ = custom(balancer(events), [], num_epochs=1, restore=path, shuffle=True)
    return {
        "before": before,
        "after": after,
        "restored": [event.policy for event in named(events, "EstimatesRestored")],
        "first_step": [event.step for event in named(events, "StepMeasured")][:1],
    }


class Interrupt(keras.callbacks.Callback):
    """Ends ``fit`` at its third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


@case
def backup():
    """`BackupAndRestore` goes on with a fit, epoch by epoch."""
    ended = []
    for interrupts in ([], [Interrupt()], []):
        folder = FOLDER / f"backup{TASK}{'' if ended else 'whole'}"
        with balancer() as made:
            trained = made.prepare(compiled())
            kept = keras.callbacks.BackupAndRestore(str(folder))
            callbacks = [kept, made.callback(), *interrupts]
            dataset = made.dataset(data(), shuffle=True)
            try:
                trained.fit(dataset, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
            except InterruptedError:
                ended.append(None)
                continue
        ended.append(weights(trained))
    return {"whole": ended[0], "resumed": ended[2]}


@case
def speeds():
    """Workers that sleep for each sample, the first for the longest."""
    each_s = 0.016 / 2**TASK

    class Slow(keras.layers.Layer):
        def call(self, x):
            def sleep(rows):
                time.sleep(each_s * len(rows))
                return rows

            rows = tf.numpy_function(sleep, [x], x.dtype)
            rows.set_shape(x.shape)
            return rows

    events = []
    with balancer(events, batch_size=28, policy="auto") as made:
        with STRATEGY.scope():
            slow = keras.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(1)])
            slow.compile(keras.optimizers.SGD(0.01), loss="mse")
        slow = made.prepare(slow)
        slow.fit(made.dataset(data(28 * 12)), shuffle=False, verbose=0)
        planned = made.batch_sizes
    return {
        "planned": planned,
        "compute_s": [list(event.compute_s) for event in named(events, "StepMeasured")],
    }


@case
def refused():
    """What cannot be balanced says so, the same on every worker."""
    said = {}

    def trial(name, function):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                function()
            said[name] = None
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    x, y = data()
    slices = tf.data.Dataset.from_tensor_slices
    made = balancer()
    for name, source in {
        "batched": slices((x, y)).batch(4),
        "batched, prefetched": slices((x, y)).batch(4).prefetch(2),
        "endless": slices((x, y)).repeat(),
        "unknown": slices((x, y)).filter(lambda *_: True),
        "rows": (x, y[:5]),
        "none": 7,
    }.items():
        trial(name, lambda source=source: made.dataset(source))
    trial("shuffled pipeline", lambda: made.dataset(slices((x, y)), shuffle=True))
    trial("policy", lambda: balancer(policy="fastest"))
    trial("policy class", lambda: balancer(policy=Swing))
    trial("size", lambda: Balancer(STRATEGY, 2))
    trial("reduction", lambda: balancer(loss_reduction="max"))
    trial("strategy", lambda: Balancer("mirrored", 12))
    trial("strategy alone", lambda: Balancer(tf.distribute.get_strategy(), 12))
    trial("no model", lambda: made.prepare(len))
    trial("no optimizer", lambda: made.prepare(model(), "sgd"))
    trial("state", lambda: made.load_state_dict({"format": "other"}))
    trial("clipping", lambda: made.prepare(model(), keras.optimizers.SGD(clipnorm=1.0)))
    normed = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    trial("batch norm", lambda: made.prepare(normed))
    active = keras.layers.Dense(1, activity_regularizer="l2")
    trial("activity", lambda: made.prepare(keras.Sequential([keras.Input((4,)), active])))
    trial("twice", lambda: made.prepare(made.prepare(compiled())))
    for name, options in {
        "jit": {"jit_compile": True},
        "several steps": {"steps_per_execution": 4},
        "sum": {"loss": keras.losses.MeanSquaredError(reduction="sum")},
    }.items():
        odd = made.prepare(compiled(**options))
        trial(name, lambda odd=odd: odd.fit(x, y, verbose=0))
    trial("plain data", lambda: balanced_fit_on(x, y))
    trial("fixed size", fixed_size)
    return said


def balanced_fit_on(x, y):
    with balancer() as made:
        trained = made.prepare(compiled())
        made.dataset((x, y))
        trained.fit(x, y, batch_size=6, shuffle=False, verbose=0)


def fixed_size():
    """A function that is traced for the size of one batch."""
    trained = balancer().prepare(model())
    tf.function(lambda x: trained(x, training=True))(tf.zeros((5, 4), tf.float64))


class Die(keras.callbacks.Callback):
    """Worker 2 is gone after its third batch."""

    def on_train_batch_end(self, batch, logs=None):
        if TASK == 2 and batch == 3:
            os._exit(9)


@case
def killed():
    """One is killed in the middle of a fit; comes last."""
    made = balancer()
    trained = made.prepare(compiled())
    dataset = made.dataset(data())
    began_s = time.monotonic()
    try:
        trained.fit(dataset, epochs=50, shuffle=False, verbose=0, callbacks=[Die()])
    except WorkerLostError as error:
        return {"rank": error.rank, "said": str(error), "after_s": time.monotonic() - began_s}
    finally:
        made.close()
    return {"rank": None}


def main():
    for name in sys.argv[2:]:
        began_s = time.monotonic()
        found = CASES[name]()
        print(f"worker {TASK}: {name} took {time.monotonic() - began_s:.1f} s", flush=True)
        (FOLDER / f"{name}{TASK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    keras.backend.set_floatx("float64")
    several = "TF_CONFIG" in os.environ
    STRATEGY = (
        tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    )
    main()
