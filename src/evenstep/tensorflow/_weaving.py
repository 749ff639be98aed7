"""What is woven into the training graph: the weight at the output, and the clock around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from ..exceptions import invalid


class StepListener(Protocol):
    """Is told of forwards and of complete gradients, while the graph runs."""

    def begin_forward(self) -> float:
        """Return the weight of the forward that begins."""

    def gradients_done(self) -> None:
        """Take notice that this worker's own gradients are there, before they are summed."""


def weave_into_model(model: keras.Model, listener: StepListener, *, weighs: bool) -> None:
    """Have every training forward of ``model`` announced and weighted.

    The outputs stay as they are; what flows back through them is multiplied by the weight, which
    is read while the graph runs: no size is a constant in it, so one trace serves them all.

    Args:
        model: the user's outermost one; its ``call`` is replaced on the object alone.
        listener: is told of forwards.
        weighs: whether weights can differ from 1.
    """
    call = model.call

    @functools.wraps(call)
    def woven(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("training") is False:
            return call(*args, **kwargs)
        first = next(value for value in tf.nest.flatten((args, kwargs)) if tf.is_tensor(value))
        _check_is_dynamic(first)

        def begin(_: Any) -> Any:
            return np.float64(listener.begin_forward())

        # After the batch has arrived, and before anything is computed from it.
        weight = tf.numpy_function(begin, [tf.shape(first)], tf.float64)
        weight.set_shape(())
        with tf.control_dependencies([weight]):
            args, kwargs = tf.nest.map_structure(_same, (args, kwargs))
        outputs = call(*args, **kwargs)
        if not weighs:
            return outputs
        return tf.nest.map_structure(lambda output: _weighted(output, weight), outputs)

    model.call = woven


def weave_into_optimizer(optimizer: Any, listener: StepListener) -> None:
    """Have ``optimizer`` announce complete gradients, and wait for nobody before that.

    Args:
        optimizer: of Keras; its ``apply`` is replaced on the object alone.
        listener: is told of gradients.
    """
    apply = optimizer.apply

    def done() -> None:
        listener.gradients_done()

    @functools.wraps(apply)
    def woven(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        grads = list(grads)
        parts = tf.nest.flatten(grads, expand_composites=True)
        with tf.control_dependencies([part for part in parts if part is not None]):
            told = tf.numpy_function(done, [], [])
        with tf.control_dependencies(_operations(told)):
            grads = [tf.nest.map_structure(_same, grad, expand_composites=True) for grad in grads]
        return apply(grads, trainable_variables)

    optimizer.apply = woven


def _operations(told: Any) -> list[Any]:
    """Return what runs the call: an operation in a graph; eagerly it is over by now."""
    return [] if tf.executing_eagerly() else tf.nest.flatten(told)


def _same(value: Any) -> Any:
    """Return a tensor as one that comes after what it is made to depend on."""
    return _like(tf.identity(value), value) if tf.is_tensor(value) else value


def _weighted(output: Any, weight: tf.Tensor) -> Any:
    if not (tf.is_tensor(output) and output.dtype.is_floating):
        return output
    if getattr(output, "_keras_mask", None) is not None:
        raise invalid(
            'Balancer(loss_reduction="mean")',
            "have outputs without a mask",
            "a masked output, whose loss is a mean over what each worker left unmasked",
            'Use losses with `reduction="sum"` and `loss_reduction="sum"`, or drop the mask.',
        )
    return _scaled(output, weight)


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _scaled(output: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
    """Return the output itself, with a gradient that is ``weight`` times its own."""

    def backward(gradient: tf.Tensor) -> tuple[tf.Tensor, None]:
        # A worker without samples may have a loss that is not a number: its weight is 0.
        return tf.math.multiply_no_nan(gradient, tf.cast(weight, gradient.dtype)), None

    return tf.identity(output), backward


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
            "`next(iterator)` inside of the function.",
        )
