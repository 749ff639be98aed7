"""What is woven into the training graph: the weight at the output, and the clock around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ..exceptions import invalid
from ._training_steps import TrainingSteps

_WEIGHTED = "evenstep_weighted"  # in the name of what weights
_ENDS = ("StopGradient", "ZerosLike", "OnesLike")  # no gradient goes through them


def weave_into_model(model: keras.Model, steps: TrainingSteps) -> None:
    """Have every training forward of ``model`` announced and weighted.

    The outputs stay as they are; what flows back through them is multiplied by the weight, which
    is read while the graph runs: no size is a constant in it, so one trace serves them all. What
    an earlier balancer wove in is replaced.
    """
    weighs = steps.loss_reduction == "mean"

    def woven(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("training") is False or steps.is_resting:
            return call(*args, **kwargs)
        given = [value for value in tf.nest.flatten((args, kwargs)) if tf.is_tensor(value)]
        first = given[0]
        _check_is_dynamic(first)
        if weighs:
            _check_is_unweighted(model, given, within=steps.forwarding)

        def begin(_: Any) -> Any:
            return np.float64(steps.begin_forward())

        # After the batch has arrived, and before anything is computed from it.
        weight = tf.numpy_function(begin, [tf.shape(first)], tf.float64)
        weight.set_shape(())
        with tf.control_dependencies([weight]):
            args, kwargs = tf.nest.map_structure(_same, (args, kwargs))
        before, steps.forwarding = steps.forwarding, model.name
        earlier = {id(loss) for layer in model._flatten_layers() for loss in layer._losses}
        try:
            outputs = call(*args, **kwargs)
        finally:
            steps.forwarding = before
        if not weighs:
            return outputs
        _weight_added_losses(model, weight, earlier)
        return tf.nest.map_structure(lambda output: _weighted(output, weight), outputs)

    weave(model, "call", woven)


def weave_into_optimizer(optimizer: Any, done: Callable[[], None]) -> None:
    """Have ``optimizer`` announce complete gradients, and wait for no worker before that.

    Args:
        optimizer: of Keras; its ``apply`` is replaced on the object alone.
        done: called when this worker's own gradients are there, before they are summed.
    """

    def woven(
        apply: Callable[..., Any], grads: Sequence[Any], trainable_variables: Any = None
    ) -> Any:
        return apply(after(list(grads), done), trainable_variables)

    weave(optimizer, "apply", woven)


def after(nested: Any, call: Callable[[], None]) -> Any:
    """Return what is nested as it is, once all of it was there and the call was made after it."""
    parts = tf.nest.flatten(nested, expand_composites=True)
    with tf.control_dependencies([part for part in parts if part is not None]):
        called = tf.numpy_function(call, [], [])
    # What runs the call is an operation in a graph; eagerly it is over by now.
    operations = [] if tf.executing_eagerly() else tf.nest.flatten(called)
    with tf.control_dependencies(operations):
        return tf.nest.map_structure(_same, nested, expand_composites=True)


def weave(part: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method on one object alone, with what it was at first if that is done again."""
    method = getattr(part, name)
    method = getattr(method, "_woven_around", method)

    @functools.wraps(method)
    def woven(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    woven._woven_around = method  # type: ignore[attr-defined]
    setattr(part, name, woven)


def is_woven(part: Any, name: str) -> bool:
    """Tell whether a method was replaced by ``weave``."""
    return hasattr(getattr(part, name), "_woven_around")


def _same(value: Any) -> Any:
    """Return a tensor as one that comes after what it is made to depend on."""
    return _like(tf.identity(value), value) if tf.is_tensor(value) else value


def _weighted(output: Any, weight: tf.Tensor) -> Any:
    if not (tf.is_tensor(output) and (output.dtype.is_floating or output.dtype.is_complex)):
        return output
    check_is_unmasked(output)
    return _scaled(output, weight)


def check_is_unmasked(outputs: Any) -> None:
    """Raise if an output has a mask."""
    if any(getattr(each, "_keras_mask", None) is not None for each in tf.nest.flatten(outputs)):
        raise invalid(
            'Balancer(loss_reduction="mean")',
            "have outputs without a mask",
            "a masked output, whose loss is a mean over what each worker left unmasked",
            'Use losses with `reduction="sum"` and `loss_reduction="sum"`, or drop the mask.',
        )


def _weight_added_losses(model: keras.Model, weight: tf.Tensor, earlier: set[int]) -> None:
    """Weight what layers have added by `add_loss`, as means over the samples of this forward.

    A loss of parameters alone stays what it is, as weights are 1 on average. Activity regularizers
    are left alone: `prepare` has warned of them.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "activity_regularizer", None) is None:
            layer._losses[:] = [
                loss if id(loss) in earlier else _weighted(loss, weight) for loss in layer._losses
            ]


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _scaled(output: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Return the output itself, with a gradient that is ``weight`` times its own."""

    def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, None]:
        # In short formats the weight itself would be rounded, for all samples of a worker alike.
        wide = gradient if gradient.dtype.size > 2 else tf.cast(gradient, tf.float32)
        # A worker without samples may have a loss that is not a number: its weight is 0.
        product = tf.math.multiply_no_nan(wide, tf.cast(weight, wide.dtype))
        return tf.cast(product, gradient.dtype), None

    return tf.identity(output, name=_WEIGHTED), backward


def _check_is_unweighted(model: Any, given: Sequence[Any], *, within: str | None) -> None:
    """Raise if what flows back through this forward is weighted by another one as well.

    In eager mode the origin of a tensor is unknown, and only forwards within others are found.
    """
    other = within or next(filter(None, map(_weighted_before, given)), None)
    if other is not None:
        raise invalid(
            "Balancer.prepare(model)",
            "be given no models of which one's output goes into another: gradients would be "
            "weighted by both",
            f"{model.name!r} " + (f"within {other!r}" if within else "behind another one"),
            "Prepare only the last one, such as a critic behind a generator, with all optimizers.",
        )


def _weighted_before(tensor: Any) -> str | None:
    """Return the operation that weights what flows back from a tensor of a graph, if any does."""
    if not hasattr(tensor, "op") or tf.executing_eagerly():
        return None
    seen, waiting = set(), [tensor]
    while waiting:
        source = waiting.pop()
        operation = source.op
        flows = source.dtype.is_floating or source.dtype.is_complex
        if not flows or operation in seen or operation.type in _ENDS:
            continue
        seen.add(operation)
        if operation.name.rpartition("/")[2].startswith(_WEIGHTED):
            return str(operation.name)
        outside = getattr(operation.graph, "captures", ())
        waiting.extend(outer for outer, inner in outside if inner is source and _is_in_graph(outer))
        waiting.extend(operation.inputs)
    return None


def _is_in_graph(tensor: Any) -> bool:
    return not hasattr(tensor, "numpy") and hasattr(tensor, "op")


def _like(copy: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Return ``copy`` with the mask of ``value``, if that carries one."""
    mask = getattr(value, "_keras_mask", None)
    if mask is not None:
        copy._keras_mask = mask
    return copy


def _check_is_dynamic(batch: tf.Tensor) -> None:
    """Raise if the graph being traced is for one batch size alone.

    Another one would be traced for every new size, on each worker at another time, and TensorFlow
    numbers the collectives of each trace: workers would wait for each other for ever.
    """
    if tf.inside_function() and batch.shape.rank and batch.shape[0] is not None:
        raise invalid(
            "tf.function(step)",
            "leave the batch size open, as every worker's differs from step to step",
            f"a first input of shape {batch.shape}",
            "Write `@tf.function(input_signature=[dataset.element_spec])`, or call "
            "`next(iterator)` inside of the function; where it does not train, say "
            "`training=False`.",
        )
