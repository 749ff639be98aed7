"""``fit`` and ``evaluate`` under several workers, which Keras 3 cannot do by itself.

They take arrays or a balancer's data set, and report losses and metrics over all workers' samples.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, final

import keras
import numpy as np
import tensorflow as tf

from ..exceptions import invalid
from ._keras_checks import check_compiled, guard_losses
from ._keras_session import KerasSession
from ._training_steps import TrainingSteps, check_is_unmasked, weave

_SPLIT = "Model.fit(validation_split=...)"


@final
class Fit:
    """Has ``fit`` take arrays as in plain Keras, in steps of the balancer's global batch size.

    Arrays become the balancer's training data, shuffled unless ``fit(shuffle=False)``, and the last
    ``validation_split`` of them the data that each epoch is judged on. The same arrays may be given
    again: the orders of epochs continue.
    """

    def __init__(
        self,
        session: KerasSession,
        global_batch_size: int,
        *,
        make: Callable[..., Any],
        made: Callable[[], Any],
    ) -> None:
        self._session = session
        self._global_batch_size = global_batch_size
        self._make = make
        self._made = made
        self._is_alone = session.steps.world_size == 1
        self._key: list[Any] = []  # what the training data was made of

    def install(self, model: keras.Model) -> None:
        """Replace ``fit`` of a model, in place of what an earlier balancer did."""

        def run(fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self._session.ending():
                if model.compiled and not self._is_alone:
                    check_compiled(model, self._session.steps.loss_reduction)
                given = self._read(inspect.signature(fit).bind(*args, **kwargs).arguments)
                if not self._is_alone:
                    # Before Keras makes variables: their collectives would wait for a lost worker.
                    self._session.open()
                return fit(**given)

        weave(model, "fit", run)
        weave(model, "evaluate", self._evaluate)

    def _evaluate(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x = inspect.signature(evaluate).bind(*args, **kwargs).arguments.get("x")
        if not self._is_alone and x is not None and x is self._made():
            raise invalid(
                "Model.evaluate(x)",
                "be data as it is, in `fit(validation_data=...)` too",
                "what `balancer.dataset(...)` returned, of which every batch is trained on",
                "Give the arrays, or a `tf.data.Dataset` with its `.batch(...)`.",
            )
        return evaluate(*args, **kwargs)

    def _read(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments to call ``fit`` with, in place of those that it was given.

        Raises:
            ValueError: it was given other data, other sizes of steps, or no part to train on.
            RuntimeError: it was given other arrays than before.
        """
        if _is_arrays(given.get("x")):
            return self._with_arrays(given)
        if not (self._is_alone or given.get("x") is self._made()):
            raise invalid(
                "Model.fit(x)",
                "be arrays, or what `balancer.dataset(...)` returned",
                type(given.get("x")).__name__,
                "Give a `tf.data.Dataset` of single samples to `balancer.dataset(...)` first.",
            )
        return given

    def _with_arrays(self, given: dict[str, Any]) -> dict[str, Any]:
        names = ("x", "y", "sample_weight", "batch_size", "validation_split", "shuffle")
        rest = {name: value for name, value in given.items() if name not in names}
        x, y, weight = (given.get(name) for name in names[:3])
        size = self._global_batch_size
        if given.get("batch_size") not in (None, size):
            raise invalid(
                "Model.fit(batch_size=...)",
                f"be the {size} samples of the balancer's `global_batch_size`, or be left out",
                given["batch_size"],
                "Every worker's share of a step is sized by the balancer.",
            )
        parts = tuple(part for part in (x, y, weight) if part is not None)
        split, shuffle = given.get("validation_split") or 0.0, bool(given.get("shuffle", True))
        training, judged = parts, None
        if split and rest.get("validation_data") is None:
            training, judged = _split(parts, split)
        if judged is not None:
            rest["validation_data"] = judged
        if _is_arrays(rest.get("validation_data")):
            rest["validation_batch_size"] = rest.get("validation_batch_size") or size
        key = [*tf.nest.flatten(parts), split if judged is not None else 0.0, shuffle]
        dataset = self._made()
        if dataset is None or not _same(key, self._key):
            training = tf.nest.map_structure(_as_keras, training)
            source = training if len(training) > 1 else training[0]
            dataset, self._key = self._make(source, shuffle=shuffle), key
        return {"x": dataset, "shuffle": False, **rest}


def _is_arrays(value: Any) -> bool:
    leaves = tf.nest.flatten(value)
    return bool(leaves) and all(leaf is None or hasattr(leaf, "__array__") for leaf in leaves)


def _split(parts: tuple[Any, ...], share: float) -> tuple[Any, Any]:
    """Return what to train on, and the last rows, as Keras cuts them."""
    rows = {len(part) for part in tf.nest.flatten(parts)}
    cut = math.floor(min(rows) * (1 - share))
    if not 0 < cut < min(rows):
        raise invalid(
            _SPLIT,
            "leave some rows on both sides",
            f"{share} of {min(rows)} rows",
            "Give more rows, or `validation_data=...`.",
        )
    rows_of = tf.nest.map_structure
    return rows_of(lambda part: part[:cut], parts), rows_of(lambda part: part[cut:], parts)


def _as_keras(part: Any) -> Any:
    """Return an array with its numbers as short as Keras makes them."""
    array = np.asarray(part)
    if not np.issubdtype(array.dtype, np.floating):
        return array
    return array.astype(keras.config.floatx(), copy=False)


def _same(key: list[Any], before: list[Any]) -> bool:
    pairs = zip(key, before, strict=False)
    return len(key) == len(before) and all(
        one is other if hasattr(one, "__array__") else one == other for one, other in pairs
    )


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


@final
class FitByWorkers:
    """Has ``model.fit`` and ``model.evaluate`` run on several workers, once installed.

    Keras 3 itself cannot, up to 3.15 at least (keras-team/keras#20585): before training it reduces
    a whole batch over the workers, and in every step metrics along an axis that they have not.
    Both are replaced on the object alone. What is reported is said in ``Reports``.
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
        self._reports = Reports(model, session.steps)

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
        self._reports.weave()

    def _train(self, batch: Any) -> Any:
        return self._reports.of_step(self._model.train_step, batch, trains=True)

    def _test(self, batch: Any) -> Any:
        with self._session.steps.resting():
            return self._reports.of_step(self._model.test_step, batch, trains=False)

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
        self._reports.note_loss(loss)
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


def _symbol(spec: Any) -> keras.KerasTensor:
    """Return a symbolic input for what a data set hands out."""
    value = spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
    return keras.KerasTensor(value.shape, dtype=value.dtype.name)
