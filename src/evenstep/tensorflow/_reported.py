"""What `fit` and `evaluate` report: losses and metrics over all workers' samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ._training_steps import TrainingSteps
from ._weaving import weave

Logs = dict[str, Any]


class Reports:
    """Has a model's losses and metrics count every worker's samples, in the training graph.

    Keras keeps sums and counts, each worker of its own samples. They are added up over all workers
    once a step, so all workers see the same. Where it counts numbers of which each stands for a
    batch (losses, metric functions that return one, what a ``train_step`` of one's own gives to a
    ``keras.metrics.Mean``), they count as many times as the batch has samples. What a
    ``train_step`` returns that is no metric of the model is averaged in the same way. Losses that
    ``compute_loss`` returned are reported without Keras' share of a replica.
    """

    def __init__(self, model: keras.Model, steps: TrainingSteps) -> None:
        self._model = model
        self._world_size = steps.world_size
        self._is_sum = steps.loss_reduction == "sum"
        self._steps = steps
        self._own: Any = None  # samples of this worker, while a step is traced
        self._counted: Any = None  # what a loss of its batch counts for
        self._losses: list[Any] = []  # that `compute_loss` has returned in it
        self._updated: set[str] = set()  # names of the means that the step has added to

    def weave(self) -> None:
        """Have means count samples, those made since the last call included."""
        model, compiled = self._model, self._model._compile_loss
        losses = [model._loss_tracker, *([] if compiled is None else compiled.metrics)]
        metrics = [] if model._compile_metrics is None else model._compile_metrics.metrics
        for metric in [*losses, *model.metrics, *metrics]:
            if type(metric) is keras.metrics.Mean:
                is_loss = any(metric is loss for loss in losses)
                weave(metric, "update_state", self._counting(metric.name, is_loss=is_loss))
            elif isinstance(metric, keras.metrics.MeanMetricWrapper):
                weave(metric, "_fn", self._for_each_sample)

    def note_loss(self, loss: Any) -> None:
        """Take notice of a loss that is a worker's part of all workers' together."""
        self._losses.append(loss)

    def of_step(self, step: Callable[[Any], Any], batch: Any, *, trains: bool) -> Any:
        """Run a step on one replica; return what is reported of it, the same on all workers."""
        first = next(part for part in tf.nest.flatten(batch) if tf.is_tensor(part))
        self._own = tf.shape(first)[0]
        self._counted = self._own
        if self._is_sum:
            whole = self._whole_step() if trains else _sum_of_all([self._own])[0]
            self._counted = tf.cast(whole, keras.backend.floatx()) / self._world_size
        self._updated.clear()
        try:
            logs = step(batch)
            return self._over_all(logs)
        finally:
            self._own = self._counted = None
            self._losses.clear()

    def _counting(self, name: str, *, is_loss: bool) -> Callable[..., Any]:
        def update(method: Callable[..., Any], values: Any, sample_weight: Any = None) -> Any:
            self._updated.add(name)
            if self._own is None or not (is_loss or sample_weight is None):
                return method(values, sample_weight=sample_weight)
            if is_loss and values.shape.rank:  # of each sample, times the number of workers
                own = tf.cast(self._own, values.dtype)
                mean = tf.math.divide_no_nan(tf.reduce_sum(values), own * self._world_size)
                return method(mean, sample_weight=self._own)
            if tf.convert_to_tensor(values).shape.rank:
                return method(values, sample_weight=sample_weight)
            value, count = self._of_batch(values)
            count = self._counted if is_loss else count
            if count is self._own:  # a mean over no samples is no number
                value = tf.where(self._own > 0, value, tf.zeros_like(value))
            return method(value, sample_weight=count)

        return update

    def _for_each_sample(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a metric's function returns; for each sample, if that is one number."""
        values = function(*args, **kwargs)
        if self._own is None or tf.convert_to_tensor(values).shape.rank:
            return values
        return tf.fill([self._own], values)

    def _of_batch(self, value: Any) -> tuple[Any, Any]:
        """Return a number that stands for a batch as it is to be reported, and its count."""
        if any(value is loss for loss in self._losses):
            return value * tf.cast(self._world_size, value.dtype), self._counted
        return value, self._own

    def _whole_step(self) -> tf.Tensor:
        # Asked once the batch is there: before that, the step under way is the one before.
        whole = tf.numpy_function(lambda _: self._steps.num_samples, [self._own], tf.int64)
        whole.set_shape(())
        return whole

    def _over_all(self, logs: Any) -> Any:
        kept, results = self._model.metrics_variables, self._model.get_metrics_result()
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        loose = [
            name
            for name, value in (logs.items() if isinstance(logs, dict) else ())
            if tf.is_tensor(value) and not value.shape.rank and not self._is_kept(name, results)
        ]
        weighted = []
        for name in loose:
            value, count = self._of_batch(logs[name])
            weighted.append(_product(value, count))
        parts = [_part(variable, replica, self._world_size) for variable in kept]
        one = tf.cast(self._own, keras.backend.floatx())
        summed = _sum_of_all([*parts, *weighted, one])
        with keras.StatelessScope(state_mapping=list(zip(kept, summed[: len(kept)], strict=True))):
            results = self._model.get_metrics_result()
        means = [tf.math.divide_no_nan(each, summed[-1]) for each in summed[len(kept) : -1]]
        averaged = dict(zip(loose, means, strict=True))
        if not isinstance(logs, dict):
            return results
        return {name: averaged.get(name, results.get(name, logs[name])) for name in logs}

    def _is_kept(self, name: str, results: Logs) -> bool:
        """Tell whether what is reported under a name is a metric that the step has added to."""
        is_mean = any(
            metric.name == name and type(metric) is keras.metrics.Mean
            for metric in self._model.metrics
        )
        return name in self._updated if is_mean else name in results


def _product(value: Any, count: Any) -> tf.Tensor:
    """Return a number as often as it counts; 0 of what counts for nothing."""
    floatx = keras.backend.floatx()
    return tf.math.multiply_no_nan(tf.cast(value, floatx), tf.cast(count, floatx))


def _part(variable: Any, replica: Any, world_size: int) -> tf.Tensor:
    """Return what of a metric's variable is to be summed, as its maker said how to combine it."""
    value = tf.identity(variable.value)
    if variable.aggregation == "mean":
        return tf.cast(tf.cast(value, tf.float64) / world_size, value.dtype)
    if variable.aggregation == "only_first_replica":
        return tf.where(tf.equal(replica, 0), value, tf.zeros_like(value))
    return value


def _sum_of_all(parts: list[Any]) -> list[Any]:
    """Return sums over all workers, by one collective for each type of numbers."""
    context = tf.distribute.get_replica_context()
    summed = list(parts)
    for dtype in sorted({part.dtype.name for part in parts}):
        places = [place for place, part in enumerate(parts) if part.dtype.name == dtype]
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [parts[place] for place in places])
        for place, total in zip(places, sums, strict=True):
            summed[place] = total
    return summed
