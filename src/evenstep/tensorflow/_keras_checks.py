"""What cannot be balanced in arguments, a model, its optimizer or how it was compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from .._planner import Bounds
from .._warning import warn
from ..exceptions import invalid
from ._training_steps import weave

_OF_REDUCTION = {"mean": ("sum_over_batch_size", "mean"), "sum": ("sum", "none", None)}


def checked_bounds(bounds: Bounds) -> Bounds:
    """Return the bounds, if they can be kept here."""
    if bounds.vary != "size" or bounds.max == "probe":
        raise invalid(
            "Balancer(bounds=...)",
            "vary sizes, up to limits that are given",
            bounds,
            "Forwards of one size, and limits found by trial, exist only for PyTorch.",
        )
    return bounds


def check_model(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Raise or warn where no weight makes a model's gradient exact.

    Raises:
        ValueError: it is not a Keras model, or not made under the strategy.
    """
    if not isinstance(model, keras.Model):
        raise invalid(
            "Balancer.prepare(model)",
            "be a `keras.Model`, and optimizers after it",
            repr(model),
            "Wrap what computes the outputs in one.",
        )
    if strategy.num_replicas_in_sync > 1 and model.distribute_strategy is not strategy:
        raise invalid(
            "Balancer.prepare(model)",
            "be made under the balancer's strategy",
            f"{model.name!r}, made outside of its scope",
            "Write `with strategy.scope():` around what makes and compiles it.",
        )
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.BatchNormalization):
            problem = (
                "waits for all workers in the middle of a forward, so that their times look equal "
                "and nothing is balanced"
                if layer.synchronized
                else "normalises over each worker's own samples, so the result depends on the "
                "split, and a worker without samples in a short last step has statistics of NaN "
                "without `drop_remainder=True`"
            )
            warn(f"Layer {layer.name!r} {problem}. Use `GroupNormalization`.")
        if getattr(layer, "activity_regularizer", None) is not None:
            warn(
                f"The activity regularizer of layer {layer.name!r} bypasses the output, where "
                f"samples are weighted: its gradient is that of equal shares. Regularizers of "
                f"weights are exact."
            )


def check_optimizer(optimizer: Any) -> None:
    """Raise or warn where an optimizer does not see the gradient of the global batch.

    Raises:
        ValueError: it is not a Keras optimizer.
    """
    refused = functools.partial(invalid, "Balancer.prepare(..., optimizer)")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise refused(
            "be a `keras.optimizers.Optimizer`",
            repr(optimizer),
            "Prepare the model first, then its optimizers.",
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise refused(
            "scale no losses: a worker whose own gradient overflows skips the sum that others wait "
            "for, under plain Keras as well",
            "a `LossScaleOptimizer`",
            "Train in `mixed_bfloat16`, which needs none.",
        )
    if optimizer.gradient_accumulation_steps:
        raise refused(
            "sum gradients over workers in every step",
            f"`gradient_accumulation_steps={optimizer.gradient_accumulation_steps}`",
            "Leave it out, and give a larger `global_batch_size`.",
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    clips = [name for name in ("clipnorm", "global_clipnorm", "clipvalue") if getattr(inner, name)]
    if clips:
        warn(
            f"Keras clips each worker's own gradient before they are summed (`{clips[0]}`), so the "
            f"result depends on the split, under plain Keras as well. Train without clipping."
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
            "XLA compiles again for every batch size, and its code cannot be timed.",
        )
    if model.run_eagerly:
        raise invalid(
            "Model.compile(run_eagerly=...)",
            "be False on several workers",
            True,
            "Keras has no loss for a worker without samples then. Debug with one worker.",
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


def guard_losses(model: keras.Model, loss_reduction: str) -> None:
    """Have every loss raise while it is traced that is to be a mean over all values and is not.

    Keras leaves a single number as it is, so the workers' means would be added up. Where a loss
    leaves out values, Keras divides by those left, of which workers have different shares.
    """
    compiled = model._compile_loss
    for part in [] if compiled is None else compiled._flat_losses:
        name = getattr(part.loss, "name", "loss") if loss_reduction == "mean" else None
        weave(part.loss, "call", functools.partial(_each_sample, name))


def _each_sample(name: str | None, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a loss computes; if it has a name here, it has to be a value for each sample."""
    values = call(*args, **kwargs)
    if name is not None and not values.shape.rank:
        raise invalid(
            "Model.compile(loss=...)",
            "return a value for each sample, which Keras takes the mean of",
            f"a single number from {name!r}",
            "Leave out the mean over the batch; give `Dice` and `Tversky` their `axis`.",
        )
    if name is not None and getattr(values, "_keras_mask", None) is not None:
        raise invalid(
            "Model.compile(loss=...)",
            "be a mean over all values",
            f"one over those that {name!r} does not leave out, as by its `ignore_class`",
            'Use `reduction="sum"` and `Balancer(loss_reduction="sum")`, or give what is left out '
            "another class and a `sample_weight` of 0.",
        )
    return values
