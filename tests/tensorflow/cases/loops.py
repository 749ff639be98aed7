"""Cases of loops, of restarts and of speeds."""

import time

import keras
import tensorflow as tf
from common import (
    FOLDER,
    NUM_SAMPLES,
    STRATEGY,
    TASK,
    balancer,
    case,
    compiled,
    custom,
    data,
    ids,
    model,
    named,
    weights,
)


@case
def loop():
    """55 steps in a loop of the user's."""
    events = []
    trained, got, traces, _ = custom(balancer(events), events, num_epochs=5, shuffle=True)
    return {"weights": weights(trained), "ids": got, "traces": len(traces)}


@case
def tutorial():
    """TensorFlow's tutorial of loops: `next(iterator)` in the function, steps counted."""
    traces, got = [], []
    with balancer(loss_reduction="sum") as made:
        trained = model()
        with STRATEGY.scope():
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        trained, optimizer = made.prepare(trained, optimizer)
        dataset = made.dataset(data(), shuffle=True)

        def on_replica(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                each = tf.reduce_sum((trained(x, training=True) - y) ** 2, axis=1)
                loss = tf.nn.compute_average_loss(each, global_batch_size=12)
            gradients = tape.gradient(loss, trained.trainable_variables)
            optimizer.apply_gradients(zip(gradients, trained.trainable_variables, strict=True))
            return x

        @tf.function
        def step(iterator):
            traces.append(1)
            return STRATEGY.run(on_replica, args=(next(iterator),))

        for _ in range(3):
            iterator = iter(dataset)
            got.extend(ids([step(iterator)]) for _ in range(11))
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
    """StrategyWorkers that sleep for each sample, the first for the longest."""
    each_s = 0.016 / 2**TASK

    traces = []

    class Slow(keras.layers.Layer):
        def call(self, x):
            traces.append(1)

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
        "traces": len(traces),
        "compute_s": [list(event.compute_s) for event in named(events, "StepMeasured")],
    }
