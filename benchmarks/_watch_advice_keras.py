"""Fits as it is, watched by a callback, or with the advice: two workers, one a third as fast.

Usage: python examples/local_workers.py 2 -m benchmarks._watch_advice_keras plain|balanced
Plain takes ``TF_USE_LEGACY_KERAS=1``: Keras 3 alone cannot ``fit`` on several workers.
"""

from __future__ import annotations

import sys
from time import sleep
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks._watch_advice_clock import BATCH, NUM_STEPS, Clock

SAMPLE_S = (0.006, 0.018)  # by rank
TOGETHER = BATCH * len(SAMPLE_S)
keras = tf.keras


class Device(keras.layers.Layer):
    """Sleeps for each sample while the graph runs."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self._sample_s = sample_s

    def call(self, x: Any) -> Any:
        """Return the batch as it is, later."""

        def late(x: Any) -> Any:
            sleep(self._sample_s * len(x))
            return x

        same = tf.numpy_function(late, [x], x.dtype)
        same.set_shape(x.shape)
        return same


class Ticks(keras.callbacks.Callback):
    """Has the clock tick after each step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tick."""
        self._clock.tick()


def main() -> None:
    """Train as the argument says."""
    clock, strategy = Clock(), tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    x = np.random.default_rng(0).random((NUM_STEPS * TOGETHER, 8), np.float32)
    data: Any = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True)))
    with strategy.scope():
        layers = [keras.Input((8,)), Device(SAMPLE_S[rank]), keras.layers.Dense(1)]
        model: Any = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.01), loss="mse")
    if sys.argv[1] == "balanced":
        from evenstep.tensorflow import Balancer

        balancer = Balancer(strategy, global_batch_size=TOGETHER)
        model, data = balancer.prepare(model), balancer.dataset(data)
        callback: Any = balancer.callback()
    else:
        from evenstep.watch import KerasWatch

        data, callback = data.batch(TOGETHER), KerasWatch(every_s=0)
    model.fit(data, verbose=0, shuffle=False, callbacks=[callback, Ticks(clock)])
    if rank == 0:
        clock.say(SAMPLE_S[rank] * BATCH)


if __name__ == "__main__":
    main()
