"""Cases of workers that fail, stop or hang: what the others are told."""

import os
import signal
import time

import keras
import tensorflow as tf
from common import STRATEGY, TASK, case, data, model, stepper

from evenstep.exceptions import WorkerLostError
from evenstep.tensorflow import Balancer, Runtime

# Silence comes first: a stopped worker is both silent and behind.
WATCHFUL = Runtime(line_every=None, deadline_s=4, heartbeat_s=0.5, hang_s=8)


class Halting(keras.layers.Layer):
    """Calls something in the forward of a step, and of an evaluation."""

    def __init__(self, halt, *, in_training):
        super().__init__()
        self.halt = halt
        self.in_training = in_training

    def call(self, rows, training=None):
        def look(rows):
            self.halt()
            return rows

        if (training is not False) != self.in_training:
            return rows
        seen = tf.numpy_function(look, [rows], rows.dtype)
        seen.set_shape(rows.shape)
        return seen


def on(rank, halt):
    """Something that is done on one worker alone."""
    return halt if rank == TASK else (lambda: None)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def fail():
    raise ValueError("sample 17 has no label\nand more that is left out")


def balancer():
    return Balancer(STRATEGY, 12, policy="equal", runtime=WATCHFUL)


def told(train):
    """What a worker is told that comes out of its training."""
    try:
        train()
    except WorkerLostError as error:
        return {"rank": error.rank, "said": str(error)}
    return {"rank": None, "said": "nothing"}


def fitted(*callbacks, halt=None, in_training=True, before=lambda: None, made=None):
    """Fit, with an evaluation after each epoch."""
    with STRATEGY.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(1)]
        if halt is not None:
            layers.insert(1, Halting(halt, in_training=in_training))
        trained = keras.Sequential(layers)
        trained.compile(keras.optimizers.SGD(0.01), "mse")
    made = made or balancer()
    trained = made.prepare(trained)
    dataset = made.dataset(data())
    before()
    trained.fit(
        dataset,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[made.callback(), *callbacks],
        validation_data=data(24),
        validation_batch_size=12,
    )


def looped(between=lambda step: None, before=lambda: None):
    """A loop of the user's within the balancer."""
    trained = model()
    with STRATEGY.scope():
        optimizer = keras.optimizers.SGD(0.05)
        optimizer.build(trained.trainable_variables)
    with balancer() as made:
        trained, optimizer = made.prepare(trained, optimizer)
        dataset = made.dataset(data())
        step = stepper(trained, optimizer, dataset, [])
        before()
        for number, batch in enumerate(dataset):
            step(batch)
            between(number)


def at_third(halt):
    """A callback that halts between the third step and the fourth."""
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: halt() if batch == 2 else None
    )


@case
def raised_in_fit():
    return told(lambda: fitted(at_third(on(1, fail))))


@case
def raised_in_the_graph():
    return told(lambda: fitted(halt=on(1, fail)))


@case
def raised_in_a_loop():
    halt = on(0, fail)
    return told(lambda: looped(lambda step: halt() if step == 2 else None))


@case
def raised_and_caught():
    """The worker logs the error, and closes as if nothing had been."""
    with balancer() as made:
        try:
            return told(lambda: fitted(at_third(on(1, fail)), made=made))
        except ValueError as error:
            return {"rank": TASK, "said": str(error)}


@case
def stopped_before_fit():
    return told(lambda: fitted(before=on(1, stop)))


@case
def chief_stopped_before_a_loop():
    return told(lambda: looped(before=on(0, stop)))


@case
def stopped_in_an_evaluation():
    return told(lambda: fitted(halt=on(1, stop), in_training=False))


@case
def hung_in_the_first_step():
    return told(lambda: fitted(halt=on(1, lambda: time.sleep(600))))
