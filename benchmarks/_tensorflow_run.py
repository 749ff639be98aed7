"""One worker of the TensorFlow benchmark: python -m benchmarks._tensorflow_run FOLDER ASKED."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from evenstep.policies import AbstractPolicy, by_name
from evenstep.policies import LbBsp2020 as Moves
from evenstep.tensorflow import Balancer, Runtime

BATCH_SIZE = 70  # speeds 1 : 2 : 4 divide it


class Slow(keras.layers.Layer):
    """Sleeps for every row."""

    def __init__(self, each_s: float) -> None:
        """Take the seconds of a row."""
        keras.layers.Layer.__init__(self)
        self.each_s = each_s

    def call(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the rows, later."""

        def sleep(rows: np.ndarray) -> np.ndarray:
            time.sleep(self.each_s * len(rows))
            return rows

        slept = tf.numpy_function(sleep, [rows], rows.dtype)
        slept.set_shape(rows.shape)
        return slept


class Stopwatch(keras.callbacks.Callback):
    """Times every step from end to end."""

    def __init__(self) -> None:
        """Begin at the first step's end."""
        keras.callbacks.Callback.__init__(self)
        self.ends_s: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time."""
        self.ends_s.append(time.perf_counter())


def policy_of(name: str) -> AbstractPolicy[Any]:
    """Return the policy, quick to move where it moves a few samples at a time."""
    return Moves(delta=8, window=2) if name == "lb-bsp-2020" else by_name(name)


def seconds(strategy: Any, name: str, slopes_s: list[float], num_steps: int) -> dict[str, Any]:
    """Return how long each step of a fit took, and how it was split in the end."""
    rank = strategy.cluster_resolver.task_id
    with strategy.scope():
        layers = [keras.Input((4,)), Slow(slopes_s[rank]), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.01), loss="mse")
    quiet = Runtime(line_every=None)
    watch = Stopwatch()
    with Balancer(strategy, BATCH_SIZE, policy=policy_of(name), runtime=quiet) as balancer:
        model = balancer.prepare(model)
        rows = np.ones((BATCH_SIZE * num_steps, 4), np.float32)
        data = balancer.dataset((rows, rows[:, :1]))
        model.fit(data, verbose=0, shuffle=False, callbacks=[balancer.callback(), watch])
        sizes = balancer.batch_sizes
    return {"seconds": np.diff(watch.ends_s).tolist(), "batch_size": sizes}


def main() -> None:
    """Measure what is asked, one policy after the other."""
    folder, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    found = {
        name: seconds(strategy, name, asked["slopes_s"], num_steps)
        for name, num_steps in asked["policies"].items()
    }
    (folder / f"speeds{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
