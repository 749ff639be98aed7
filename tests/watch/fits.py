"""One worker that fits the same model several times, with a watch and without: ``fits.py FOLDER``.

Prints the losses of each, bit by bit. Rank 1 sleeps long, in its forward or in a callback.
"""

import contextlib
import gc
import os
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from evenstep.watch import KerasWatch

FOLDER = Path(sys.argv[1])
STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
RANK = STRATEGY.cluster_resolver.task_id
STEPS, BATCH_SIZE = 40, 24
keras = tf.keras


def sleep(values):
    """Sleep for several times what a step takes of a core that others want as well."""
    time.sleep(0.1 if RANK == 1 else 0.01)
    return values


def slept(values):
    """The same values, after a sleep in the graph."""
    same = tf.numpy_function(sleep, [values], values.dtype)
    same.set_shape(values.shape)
    return same


class Sleep(keras.layers.Layer):
    """Computes for long, on rank 1."""

    def call(self, values):
        return slept(values)


class Log(keras.callbacks.Callback):
    """Writes a log for long, on rank 1."""

    def on_train_batch_end(self, batch, logs=None):
        sleep(None)


class Losses(keras.callbacks.Callback):
    """Keeps all losses."""

    def __init__(self):
        super().__init__()
        self.all = []

    def on_train_batch_end(self, batch, logs=None):
        self.all.append(float(logs["loss"]).hex())


def nameless():
    """Fail, as no machine does: a fault of the watch's own."""
    raise OSError("no name")


class Fail(keras.callbacks.Callback):
    """Ends a fit with an error of the user's, on all ranks."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == STEPS // 2:
            raise RuntimeError("of the user's")


class Threads(keras.callbacks.Callback):
    """Says how many threads of a watch there are, and what it has Python's collector call."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == STEPS // 2:
            names = [one.name for one in threading.enumerate()]
            calls = [call for call in gc.callbacks if "GarbageClock" in repr(call)]
            threads = names.count("evenstep-watch")
            os.write(1, f"THREADS {RANK} {threads} {len(calls)}\n".encode())


def fit(name, *watches, slow="compute"):
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH_SIZE, 32)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, (x[:, :1] > 0).astype(np.float32)))
    data = data.batch(BATCH_SIZE, drop_remainder=True)
    if slow == "input":
        data = data.map(lambda x, y: (slept(x), y))
    with STRATEGY.scope():
        layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
        sleeps = [Sleep()] if slow == "compute" else []
        model = keras.Sequential([keras.Input((32,)), *sleeps, *layers])
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    losses = Losses()
    logs = [Log()] if slow == "logging" else []
    sys.stderr.write(f"FIT {name} {RANK}\n")
    model.fit(data, verbose=0, validation_data=data.take(2), callbacks=[*logs, *watches, losses])
    left = {"train_step", "save", "train_function"} & {
        key for key, value in vars(model).items() if hasattr(value, "_woven_around")
    }
    weights = b"".join(weight.tobytes() for weight in model.get_weights()).hex()
    said = f"LOSSES {name} {RANK} {' '.join(losses.all)} {weights} {sorted(left)}"
    os.write(1, f"\n{said}\n".encode())


fit("plain")
fit("watched", KerasWatch(every_s=0.5, run_dir=FOLDER / "run"))
fit("logging", KerasWatch(every_s=0), slow="logging")
fit("input", KerasWatch(every_s=0), slow="input")
watch = KerasWatch(every_s=0)
with contextlib.suppress(RuntimeError):
    fit("failed", watch, Fail())
fit("again", watch, Threads())
socket.gethostname = nameless
fit("broken", KerasWatch(every_s=0))
