"""``fit`` and ``evaluate`` under several workers, which Keras 3 cannot do by itself.

They take arrays or a balancer's data set, and report losses and metrics over all workers' samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import keras
import numpy as np
import tensorflow as tf

from ..exceptions import invalid
from ._keras_checks import check_compiled, guard_losses
from ._keras_session import KerasSession
from ._training_steps import check_is_unmasked, weave


def arrays_in(given: dict[str, Any], size: int) -> tuple[Any, bool, list[Any], dict[str, Any]]:
    """Read arguments of ``fit``, of which ``x`` is arrays.

    Args:
        given: by the user.
        size: samples of a step over all workers.

    Returns:
        What to train on, whether it is shuffled, what both were made of, and the other arguments.

    Raises:
        ValueError: other sizes of steps, or no part to train on.
    """
    names = ("x", "y", "sample_weight", "batch_size", "validation_split", "shuffle")
    rest = {name: value for name, value in given.items() if name not in names}
    if given.get("batch_size") not in (None, size):
        raise invalid(
            "Model.fit(batch_size=...)",
            f"be the {size} samples of the balancer's `global_batch_size`, or be left out",
            given["batch_size"],
            "Every worker's share of a step is sized by the balancer.",
        )
    parts = tuple(given[name] for name in names[:3] if given.get(name) is not None)
    split, shuffle = given.get("validation_split") or 0.0, bool(given.get("shuffle", True))
    training = parts
    if split and rest.get("validation_data") is None:
        training, rest["validation_data"] = _split(parts, split)
    else:
        split = 0.0
    if is_arrays(rest.get("validation_data")):
        rest["validation_batch_size"] = rest.get("validation_batch_size") or size
    source = training if len(training) > 1 else training[0]
    return source, shuffle, [*tf.nest.flatten(parts), split, shuffle], rest


def is_arrays(value: Any) -> bool:
    """Return whether a value is arrays, and no data set."""
    leaves = tf.nest.flatten(value)
    return bool(leaves) and all(leaf is None or hasattr(leaf, "__array__") for leaf in leaves)


def _split(parts: tuple[Any, ...], share: float) -> tuple[Any, Any]:
    """Return what to train on, and the last rows, as Keras cuts them."""
    rows = {len(part) for part in tf.nest.flatten(parts)}
    cut = math.floor(min(rows) * (1 - share))
    if not 0 < cut < min(rows):
        raise invalid(
            "Model.fit(validation_split=...)",
            "leave some rows on both sides",
            f"{share} of {min(rows)} rows",
            "Give more rows, or `validation_data=...`.",
        )
    rows_of = tf.nest.map_structure
    return rows_of(lambda part: part[:cut], parts), rows_of(lambda part: part[cut:], parts)


def as_keras(part: Any) -> Any:
    """Return an array with its numbers as short as Keras makes them."""
    array = np.asarray(part)
    if not np.issubdtype(array.dtype, np.floating):
        return array
    return array.astype(keras.config.floatx(), copy=False)


def are_same(key: list[Any], before: list[Any]) -> bool:
    """Return whether training data was made of the same objects and values."""
    pairs = zip(key, before, strict=False)
    return len(key) == len(before) and all(
        one is other if hasattr(one, "__array__") else one == other for one, other in pairs
    )


Logs = dict[str, Any]


@final
class FitByWorkers:
    """Has ``model.fit`` and ``model.evaluate`` run on several workers, once installed.

    Keras 3 itself cannot, up to 3.15 at least (keras-team/keras#20585): before training it reduces
    a whole batch over the workers, and in every step metrics along an axis that they have not.
    Both are replaced on the object alone.

    Losses and metrics count every worker's samples, in the training graph. Keras keeps sums and
    counts, each worker of its own samples. They are added up over all workers once a step, so all
    workers see the same. Where it counts numbers of which each stands for a batch (losses, metric
    functions that return one, what a ``train_step`` of one's own gives to a
    ``keras.metrics.Mean``), they count as many times as the batch has samples. What a
    ``train_step`` returns that is no metric of the model is averaged in the same way. Losses that
    ``compute_loss`` returned are reported without Keras' share of a replica.

    Args:
        model: of the balancer.
        strategy: of all workers.
        session: of the run.
        prepare: makes an optimizer known; returns whether it was not yet.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        session: KerasSession,
        prepare: Callable[[Any], bool],
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._prepare = prepare
        self._session = session
        self._loss_reduction = session.steps.loss_reduction
        self._world_size = session.steps.world_size
        self._own: Any = None  # samples of this worker, while a step is traced
        self._counted: Any = None  # what a loss of its batch counts for
        self._losses: list[Any] = []  # that `compute_loss` has returned in it
        self._updated: set[str] = set()  # names of the means that the step has added to

    def install(self) -> None:
        """Replace what Keras calls, in place of what an earlier balancer did."""
        model = self._model
        weave(model, "compute_loss", self._compute_loss)
        # Keras would read metrics anew, and those made outside of the strategy's scope have this
        # worker's samples alone: what a step reports is of all.
        weave(model, "_get_metrics_result_or_logs", lambda method, logs: logs)
        model.train_function = model.test_function = None
        model.make_train_function = self._make_train_function
        model.make_test_function = self._make_test_function
        model._maybe_symbolic_build = self._build

    def _make_train_function(self, force: bool = False) -> None:
        model = self._model
        check_compiled(model, self._loss_reduction)
        if self._prepare(model.optimizer) or force or model.train_function is None:
            model.train_function = self._function(self._train)

    def _make_test_function(self, force: bool = False) -> None:
        if force or self._model.test_function is None:
            self._model.test_function = self._function(self._test)

    def _build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if data_batch is not None:  # Keras gives it for a single batch alone
            raise invalid(
                "Model.train_on_batch(...)",
                "be left out with several workers, and `test_on_batch` as well: no balancer hands "
                "out its batch",
                "a call",
                "Use `fit` and `evaluate`, or a loop of your own over `balancer.dataset(...)`.",
            )
        spec = iterator._distributed_dataset.element_spec
        data_batch = tf.nest.map_structure(_symbol, spec)
        with self._strategy.scope(), self._session.steps.resting():
            self._model._symbolic_build(data_batch=data_batch)
        guard_losses(self._model, self._loss_reduction)
        self._weave()

    def _train(self, batch: Any) -> Any:
        return self._of_step(self._model.train_step, batch, trains=True)

    def _test(self, batch: Any) -> Any:
        with self._session.steps.resting():
            return self._of_step(self._model.test_step, batch, trains=False)

    def _compute_loss(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make up for Keras' share of a replica, which it rounds to single precision: 1/3 say.

        In double precision the gradient would be off by up to 6e-8. Sums have no share.
        """
        if self._loss_reduction == "mean" and not self._session.steps.is_resting:
            check_is_unmasked((args, kwargs))  # by `compute_mask`, say, after the model's `call`
        loss = method(*args, **kwargs)
        if self._loss_reduction == "mean":
            share = 1 / self._strategy.num_replicas_in_sync
            loss = loss * tf.constant(share / float(np.float32(share)), loss.dtype)
        self._losses.append(loss)
        return loss

    def _explained(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call what may wait for other workers; name the one that was lost in it."""
        try:
            return method(*args)
        except tf.errors.OutOfRangeError:
            raise  # the end of the data
        except tf.errors.OpError as error:
            cause = self._session.explain(error)
            if cause is None:
                raise
            raise cause from error

    def _function(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what Keras calls with an iterator once a step."""
        strategy = self._strategy

        def one_step(iterator: Any) -> Any:
            logs = strategy.run(step, args=(next(iterator),))
            return tf.nest.map_structure(
                lambda log: strategy.experimental_local_results(log)[0], logs
            )

        run = tf.function(one_step, autograph=False)
        return lambda iterator: self._explained(run, iterator)

    def _weave(self) -> None:
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

    def _of_step(self, step: Callable[[Any], Any], batch: Any, *, trains: bool) -> Any:
        """Run a step on one replica; return what is reported of it, the same on all workers."""
        first = next(part for part in tf.nest.flatten(batch) if tf.is_tensor(part))
        self._own = tf.shape(first)[0]
        self._counted = self._own
        if self._loss_reduction == "sum":
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
        whole = tf.numpy_function(lambda _: self._session.steps.num_samples, [self._own], tf.int64)
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
        weighted = [_product(*self._of_batch(logs[name])) for name in loose]
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
        """Return whether what is reported under a name is a metric that the step has added to."""
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


def _symbol(spec: Any) -> keras.KerasTensor:
    """Return a symbolic input for what a data set hands out."""
    value = spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
    return keras.KerasTensor(value.shape, dtype=value.dtype.name)
