"""One worker of it: python -m benchmarks._tensorflow_handover_run FOLDER ASKED."""

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

from benchmarks._tensorflow_run import Slow
from evenstep.events import StepMeasured
from evenstep.tensorflow import Balancer, Runtime

IMAGE = (8, 8, 1)


def images(num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels, the same on every worker."""
    drawn = np.random.default_rng(0)
    pixels = drawn.random((num_samples, *IMAGE), np.float32)
    return pixels, drawn.integers(10, size=num_samples)


def pipeline(num_samples: int) -> tf.data.Dataset:
    """Return them as a shuffled pipeline of single samples."""
    rows = tf.data.Dataset.from_tensor_slices(images(num_samples))
    return rows.shuffle(num_samples, seed=0)


def model_of(strategy: Any, each_s: float) -> Any:
    """Return a small network that sleeps for every image."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.Flatten()]
        head = keras.layers.Dense(10)
        return keras.Sequential([keras.Input(IMAGE), Slow(each_s), *layers, head])


class Ends(keras.callbacks.Callback):
    """Notes the ends of steps: what the clock says, and this process' processor time."""

    def __init__(self) -> None:
        """Begin at the first step's end."""
        keras.callbacks.Callback.__init__(self)
        self.clock_s: list[float] = []
        self.cpu_s: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note both."""
        self.clock_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())

    def told(self) -> dict[str, list[float]]:
        """Return both of every step but the first."""
        return {"seconds": np.diff(self.clock_s).tolist(), "cpu_s": np.diff(self.cpu_s).tolist()}


def loop(strategy: Any, model: Any, optimizer: Any, dataset: Any) -> Ends:
    """Train one epoch as TensorFlow's tutorial does."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def on_replica(batch: Any) -> None:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(loss_of(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function(input_signature=[dataset.element_spec])
    def step(batch: Any) -> None:
        strategy.run(on_replica, args=(batch,))

    ends = Ends()
    for number, batch in enumerate(dataset):
        step(batch)
        ends.on_train_batch_end(number)
    return ends


class Contest:
    """Trains in one way after the other, each with a model of its own.

    Args:
        strategy: of all workers.
        each_s: seconds that an image takes on this one.
        num_steps: of each way.
        batch_size: images of a step over all workers.
    """

    def __init__(self, strategy: Any, each_s: float, *, num_steps: int, batch_size: int) -> None:
        self._strategy, self._each_s = strategy, each_s
        self._num_samples, self._batch_size = num_steps * batch_size, batch_size
        self.rank = strategy.cluster_resolver.task_id

    def run(self, way: str) -> dict[str, Any]:
        """Return what every step took, in the way with that name."""
        model = model_of(self._strategy, self._each_s)
        return self._plain(model) if way == "plain" else self._balanced(model, way)

    def _optimizer(self, model: Any) -> Any:
        with self._strategy.scope():
            optimizer = keras.optimizers.SGD(0.01)
            optimizer.build(model.trainable_variables)
        return optimizer

    def _plain(self, model: Any) -> dict[str, Any]:
        number = self._strategy.num_replicas_in_sync

        def share(context: Any) -> tf.data.Dataset:
            mine = pipeline(self._num_samples).shard(number, self.rank)
            return mine.batch(self._batch_size // number, drop_remainder=True).prefetch(2)

        dataset = self._strategy.distribute_datasets_from_function(share)
        return loop(self._strategy, model, self._optimizer(model), dataset).told()

    def _balanced(self, model: Any, way: str) -> dict[str, Any]:
        events: list[Any] = []
        runtime = Runtime(line_every=None, hooks=(events.append,))
        source = (images if "arrays" in way else pipeline)(self._num_samples)
        with Balancer(self._strategy, self._batch_size, runtime=runtime) as balancer:
            if "fit" in way:
                ends = self._fit(balancer, model, source)
            else:
                model, optimizer = balancer.prepare(model, self._optimizer(model))
                dataset = balancer.dataset(source)
                ends = loop(self._strategy, model, optimizer, dataset)
            sizes = balancer.batch_sizes
        told = [event for event in events if isinstance(event, StepMeasured)]
        return {
            **ends.told(),
            "data_s": [max(event.data_s) for event in told],
            "compute_s": [event.makespan_s for event in told],
            "batch_size": sizes,
        }

    def _fit(self, balancer: Balancer, model: Any, source: Any) -> Ends:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with self._strategy.scope():
            model.compile(keras.optimizers.SGD(0.01), loss=loss)
        ends = Ends()
        model, dataset = balancer.prepare(model), balancer.dataset(source)
        model.fit(dataset, verbose=0, shuffle=False, callbacks=[balancer.callback(), ends])
        return ends


def main() -> None:
    """Measure what is asked, in turns."""
    folder, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    contest = Contest(
        strategy,
        asked["each_s"][rank],
        num_steps=asked["num_steps"],
        batch_size=asked["batch_size"],
    )
    found: dict[str, list[Any]] = {way: [] for way in asked["ways"]}
    for number in range(asked["rounds"]):
        first = number % len(asked["ways"])
        for way in asked["ways"][first:] + asked["ways"][:first]:
            print(
                f"... round {number + 1} of {asked['rounds']}: {way}", file=sys.stderr, flush=True
            )
            found[way].append(contest.run(way))
    (folder / f"handover{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
