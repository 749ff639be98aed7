"""What `fit` and `evaluate` report: losses and metrics over all workers' samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ._weaving import weave

Logs = dict[str, Any]


class Reports:
    """Has a model's losses and metrics count every worker's samples, in the training graph.

    Keras keeps sums and counts, each worker of its own samples. They are added up over all workers
    once a step, so that everybody sees the same. Where it counts numbers of which each stands for a
    batch (losses, and what a ``train_step`` of one's own gives to a ``keras.metrics.Mean``), they
    count as many times as the batch has samples. What a ``train_step`` returns that is no metric
    of the model is averaged in the same way.

    Args:
        model: the user's.
        strategy: of several workers.
        loss_reduction: ``"mean"`` or ``"sum"``, what losses do over samples.
        num_samples: returns the samples of the training step under way, over all workers.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        *,
        loss_reduction: str,
        num_samples: Callable[[], int],
    ) -> None:
        self._model = model
        self._world_size = strategy.num_replicas_in_sync
        self._is_sum = loss_reduction == "sum"
        self._num_samples = num_samples
        self._own: Any = None  # samples of this worker, while a step is traced
        self._counted: Any = None  # what a loss of its batch counts for
        self._updated: set[str] = set()  # names of the means that the step has added to

    def weave(self) -> None:
        """Have means count samples, those made since the last call included."""
        tracker = self._model._loss_tracker
        losses = [tracker, *self._model._compile_loss.metrics]
        for metric in [*losses, *self._model.metrics]:
            if type(metric) is keras.metrics.Mean:
                is_loss = any(metric is loss for loss in losses)
                weave(metric, "update_state", self._counting(metric.name, is_loss=is_loss))

    def of_step(self, step: Callable[[Any], Any], batch: Any, *, trains: bool) -> Any:
        """Run a step on one replica; return what is reported of it, the same on all workers."""
        first = next(part for part in tf.nest.flatten(batch) if tf.is_tensor(part))
        self._own = tf.shape(first)[0]
        self._counted = self._own
        if self._is_sum:
            whole = self._whole_step() if trains else _sum_of_all([self._own])[0]
            self._counted = tf.cast(whole, tf.float32) / self._world_size
        self._updated.clear()
        try:
            logs = step(batch)
            return self._over_all(logs)
        finally:
            self._own = self._counted = None

    def _counting(self, name: str, *, is_loss: bool) -> Callable[..., Any]:
        def update(method: Callable[..., Any], values: Any, sample_weight: Any = None) -> Any:
            self._updated.add(name)
            is_number = not tf.convert_to_tensor(values).shape.rank
            if self._own is None or not is_number or not (is_loss or sample_weight is None):
                return method(values, sample_weight=sample_weight)
            count = self._counted if is_loss else self._own
            if not (is_loss and self._is_sum):  # a mean over no samples is no number
                values = tf.where(self._own > 0, values, tf.zeros_like(values))
            return method(values, count)

        return update

    def _whole_step(self) -> tf.Tensor:
        # Asked once the batch is there: before that, the step under way is the one before.
        whole = tf.numpy_function(lambda _: self._num_samples(), [self._own], tf.int64)
        whole.set_shape(())
        return whole

    def _over_all(self, logs: Any) -> Any:
        kept = self._model.metrics_variables
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        loose = [
            name
            for name, value in (logs.items() if isinstance(logs, dict) else ())
            if tf.is_tensor(value) and not value.shape.rank and not self._is_kept(name)
        ]
        own = tf.cast(self._own, tf.float64)
        weighted = [tf.math.multiply_no_nan(tf.cast(logs[n], tf.float64), own) for n in loose]
        parts = [_part(variable, replica, self._world_size) for variable in kept]
        summed = _sum_of_all([*parts, *weighted, own])
        with keras.StatelessScope(state_mapping=list(zip(kept, summed[: len(kept)], strict=True))):
            results: Logs = self._model.get_metrics_result()
        means = [tf.math.divide_no_nan(each, summed[-1]) for each in summed[len(kept) : -1]]
        averaged = dict(zip(loose, means, strict=True))
        if not isinstance(logs, dict):
            return results
        return {name: averaged.get(name, results.get(name, logs[name])) for name in logs}

    def _is_kept(self, name: str) -> bool:
        """Tell whether what is reported under a name is a metric that the step has added to."""
        named = [metric for metric in self._model.metrics if metric.name == name]
        if any(type(metric) is keras.metrics.Mean for metric in named):
            return name in self._updated
        return bool(named) or name in self._names_of_compiled()

    def _names_of_compiled(self) -> set[str]:
        compiled = self._model._compile_metrics
        return set() if compiled is None else {metric.name for metric in compiled.metrics}


def _part(variable: Any, replica: Any, world_size: int) -> tf.Tensor:
    """Return what of a metric's variable is to be summed, as its maker said how to combine it."""
    value = tf.identity(variable.value)
    if variable.aggregation == "mean":
        return tf.cast(tf.cast(value, tf.float64) / world_size, value.dtype)
    if variable.aggregation == "only_first_replica":
        return tf.where(tf.equal(replica, 0), value, tf.zeros_like(value))
    return value


def _sum_of_all(parts: list[Any]) -> list[Any]:
    """Return sums over all workers."""
    context = tf.distribute.get_replica_context()
    summed: list[Any] = context.all_reduce(tf.distribute.ReduceOp.SUM, parts)
    return summed
