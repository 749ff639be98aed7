"""``fit`` and ``evaluate`` under several workers, which Keras 3 cannot do by itself."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ..exceptions import EvenstepWarning, invalid

_OF_REDUCTION = {"mean": ("sum_over_batch_size", "mean"), "sum": ("sum", "none", None)}


def fit_by_workers(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    *,
    prepare: Callable[[Any], bool],
    loss_reduction: str,
    explain: Callable[[BaseException], BaseException | None],
) -> None:
    """Have ``model.fit`` and ``model.evaluate`` run on several workers.

    Keras 3 itself cannot, up to 3.15 at least (keras-team/keras#20585): before training it reduces
    a whole batch over the workers, and in every step metrics along an axis that they have not.
    Both are replaced on the object alone. Metrics here are what Keras keeps, sums and counts,
    added up over all workers, so that every worker sees the same, weighted by samples.

    Args:
        model: the user's, compiled now or later.
        strategy: of several workers.
        prepare: makes an optimizer known; returns whether it was not yet.
        loss_reduction: what the balancer was told that losses do over samples.
        explain: returns the error behind one of TensorFlow's, or None.
    """

    def make_train_function(force: bool = False) -> None:
        check_compiled(model, loss_reduction)
        if prepare(model.optimizer) or force or model.train_function is None:
            model.train_function = _function(model, strategy, model.train_step, explain)

    def make_test_function(force: bool = False) -> None:
        if force or model.test_function is None:
            model.test_function = _function(model, strategy, model.test_step, explain)

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        if data_batch is None:
            spec = iterator._distributed_dataset.element_spec
            data_batch = tf.nest.map_structure(_symbol, spec)
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)
        _check_losses(model, loss_reduction)

    if loss_reduction == "mean":
        _scale_in_full(model, strategy.num_replicas_in_sync)
    model.make_train_function = make_train_function
    model.make_test_function = make_test_function
    model._maybe_symbolic_build = build


def check_model(model: Any) -> None:
    """Raise or warn where no weight makes a model's gradient exact.

    Raises:
        ValueError: it is none of Keras.
    """
    if not isinstance(model, keras.Model):
        raise invalid(
            "Balancer.prepare(model)",
            "be a `keras.Model`, and optimizers after it",
            repr(model),
            "Wrap what computes the outputs in one.",
        )
    for layer in _layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized:
            warnings.warn(
                f"Layer {layer.name!r} normalises over each worker's own samples, so the result "
                f"depends on the split, and a worker without samples in a short last step has "
                f"statistics that are no numbers: `drop_remainder=True`. Use `GroupNormalization`.",
                EvenstepWarning,
                stacklevel=4,
            )
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            warnings.warn(
                f"Layer {layer.name!r} waits for all workers in the middle of a forward, so that "
                f"their times look alike and nothing is balanced. Use `GroupNormalization`.",
                EvenstepWarning,
                stacklevel=4,
            )
        if getattr(layer, "activity_regularizer", None) is not None:
            warnings.warn(
                f"The activity regularizer of layer {layer.name!r} bypasses the output, where "
                f"samples are weighted: its gradient is that of equal shares. Regularizers of "
                f"weights are exact.",
                EvenstepWarning,
                stacklevel=4,
            )


def check_optimizer(optimizer: Any) -> None:
    """Raise or warn where an optimizer does not see the gradient of the global batch.

    Raises:
        ValueError: it is none of Keras.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise invalid(
            "Balancer.prepare(..., optimizer)",
            "be a `keras.optimizers.Optimizer`",
            repr(optimizer),
            "Prepare the model first, then its optimizers.",
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise invalid(
            "Balancer.prepare(..., optimizer)",
            "scale no losses: a worker whose own gradient overflows skips the sum that others wait "
            "for, under plain Keras as well",
            "a `LossScaleOptimizer`",
            "Train in `mixed_bfloat16`, which needs none.",
        )
    if optimizer.gradient_accumulation_steps:
        raise invalid(
            "Balancer.prepare(..., optimizer)",
            "sum gradients over workers in every step",
            f"`gradient_accumulation_steps={optimizer.gradient_accumulation_steps}`",
            "Leave it out, and give a larger `global_batch_size`.",
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    clips = [name for name in ("clipnorm", "global_clipnorm", "clipvalue") if getattr(inner, name)]
    if clips:
        warnings.warn(
            f"Keras clips each worker's own gradient before they are summed (`{clips[0]}`), so the "
            f"result depends on the split, under plain Keras as well. Train without clipping.",
            EvenstepWarning,
            stacklevel=4,
        )


def check_compiled(model: keras.Model, loss_reduction: str) -> None:
    """Raise unless a compiled model can be balanced in ``fit``.

    Raises:
        ValueError: it cannot; the message says why and what to do instead.
    """
    if model.jit_compile:
        raise invalid(
            "Model.compile(jit_compile=...)",
            "be False or 'auto'",
            model.jit_compile,
            "XLA compiles anew for every batch size, and knows no clock.",
        )
    if model.steps_per_execution != 1:
        raise invalid(
            "Model.compile(steps_per_execution=...)",
            "be 1",
            model.steps_per_execution,
            "Every step has a plan of its own.",
        )
    for loss in tf.nest.flatten(model.loss):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if loss is not None and reduction not in _OF_REDUCTION[loss_reduction]:
            raise invalid(
                "Balancer(loss_reduction=...)",
                "be what the compiled losses do over samples",
                f"{loss_reduction!r} and a loss with `reduction={reduction!r}`",
                "Say \"mean\" for 'sum_over_batch_size' and \"sum\" for 'sum'; a mean over "
                "weights has no exact form here.",
            )


def _check_losses(model: keras.Model, loss_reduction: str) -> None:
    """Have every loss raise while it is traced that is to be a mean and is a single number.

    Keras leaves that as it is, so the workers' means would be added up.
    """
    if loss_reduction != "mean":
        return
    for part in model._compile_loss._flat_losses:
        loss = part.loss
        if not hasattr(loss.call, "_checks_rank"):
            loss.call = _each_sample(loss.call, getattr(loss, "name", "loss"))


def _each_sample(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = call(*args, **kwargs)
        if not values.shape.rank:
            raise invalid(
                "Model.compile(loss=...)",
                "return a value for each sample, which Keras takes the mean of",
                f"a single number from {name!r}",
                "Leave out the mean over the batch; give `Dice` and `Tversky` their `axis`.",
            )
        return values

    checked._checks_rank = True  # type: ignore[attr-defined]
    return checked


def _function(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    step: Callable[[Any], Any],
    explain: Callable[[BaseException], BaseException | None],
) -> Callable[[Any], Any]:
    """Return what Keras calls with an iterator once a step."""

    def on_replica(batch: Any) -> Any:
        step(batch)
        return _metrics_of_all(model)

    def one_step(iterator: Any) -> Any:
        logs = strategy.run(on_replica, args=(next(iterator),))
        return tf.nest.map_structure(lambda log: strategy.experimental_local_results(log)[0], logs)

    run = one_step if model.run_eagerly else tf.function(one_step, autograph=False)

    def guarded(iterator: Any) -> Any:
        try:
            return run(iterator)
        except tf.errors.OutOfRangeError:
            raise  # the end of the data
        except tf.errors.OpError as error:
            cause = explain(error)
            if cause is None:
                raise
            raise cause from error

    return guarded


def _metrics_of_all(model: keras.Model) -> Any:
    """Return the metrics over all workers' samples, by one sum of all that Keras counts."""
    counted = model.metrics_variables
    own = [tf.identity(variable.value) for variable in counted]
    summed = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)
    with keras.StatelessScope(state_mapping=list(zip(counted, summed, strict=True))):
        return model.get_metrics_result()


def _scale_in_full(model: keras.Model, world_size: int) -> None:
    """Make up for Keras' share of a replica, which it rounds to single precision: 1/3 and others.

    In double precision its gradient would be off by up to 6e-8.
    """
    compute_loss = model.compute_loss
    missing = (1 / world_size) / float(np.float32(1 / world_size))

    @functools.wraps(compute_loss)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(*args, **kwargs)
        return loss * tf.constant(missing, loss.dtype)

    model.compute_loss = scaled


def _symbol(spec: Any) -> keras.KerasTensor:
    """Return a symbolic input for what a data set hands out."""
    value = spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
    return keras.KerasTensor(value.shape, dtype=value.dtype.name)


def _layers(model: Any) -> Iterator[Any]:
    """Yield the model's layers, nested ones included."""
    for layer in model.layers:
        yield layer
        if hasattr(layer, "layers"):
            yield from _layers(layer)
