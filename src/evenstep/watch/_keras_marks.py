"""Marks in the graph of a training step: own batch, all batches and own gradients are there."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, final

import tensorflow as tf
from tensorflow.python.distribute import input_lib  # not public: it asks whether all have a batch

from ..tensorflow._weaving import after, weave
from ._keras_steps import KerasSteps

_ASKS_ALL = "_calculate_replicas_with_values"
_plain = tf.autograph.experimental.do_not_convert  # what is the user's is converted as before


@final
class KerasMarks:
    """Has a model's training step call back while its graph runs; values stay as they are.

    What is called in the graph is called after what it marks, and before what comes next. Tensors
    pass through identities. The next ``fit`` traces the step anew, with the marks or without.

    Args:
        model: of Keras 3 or ``tf_keras``, compiled.
        steps: hears of the marks.
        guard: runs what is called back, so that no fault reaches the training.
    """

    def __init__(
        self, model: Any, steps: KerasSteps, guard: Callable[[Callable[[], None]], None]
    ) -> None:
        self._model, self._steps, self._guard = model, steps, guard
        # Keras 3's ``apply_gradients`` calls ``apply``, and so does its training step.
        self._optimizer = model.optimizer
        self._applies = "apply" if hasattr(self._optimizer, "apply") else "apply_gradients"
        self._asks_all: Callable[..., Any] | None = None
        self._began_s = 0.0

    def weave(self) -> None:
        """Put the marks there, before the step is traced."""
        self._asks_all = getattr(input_lib, _ASKS_ALL)
        weave(self._model, "train_step", self._train_step)
        weave(self._optimizer, self._applies, self._apply)
        self._model.train_function = None
        setattr(input_lib, _ASKS_ALL, self._ask_all)

    def weave_call(self) -> None:
        """Mark the begin and the end of a step, around what Keras calls for one."""
        weave(self._model, "train_function", self._call)

    def unweave(self) -> None:
        """Leave everything as it was."""
        for part, name in ((self._model, "train_step"), (self._optimizer, self._applies)):
            vars(part).pop(name, None)
        self._model.train_function = None
        if self._asks_all is not None and getattr(input_lib, _ASKS_ALL) == self._ask_all:
            setattr(input_lib, _ASKS_ALL, self._asks_all)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        self._guard(self._steps.begin)
        is_whole = False
        try:
            result = method(*args)
            is_whole = True
            return result
        finally:
            self._guard(lambda: self._steps.end(is_whole=is_whole))

    def _train_step(self, method: Callable[..., Any], data: Any) -> Any:
        given = self._batch_there(data)
        logs = method(given)
        self._traced()
        return logs

    def _apply(self, method: Callable[..., Any], gradients: Any, *args: Any, **kwargs: Any) -> Any:
        given = self._gradients_done(gradients)
        return method(given, *args, **kwargs)

    @_plain  # type: ignore[untyped-decorator]
    def _ask_all(self, strategy: Any, input_workers: Any, optionals: Any) -> Any:
        assert self._asks_all is not None
        fetched: list[Any] = []
        self._guard(lambda: fetched.append(self._fetched(optionals)))
        with tf.control_dependencies([] if tf.executing_eagerly() else fetched):
            return self._asks_all(strategy, input_workers, optionals)

    def _fetched(self, optionals: Any) -> Any:
        there = [optional.has_value() for each in optionals for optional in each]
        return after(there, lambda: self._guard(self._steps.fetched))[0]

    @_plain  # type: ignore[untyped-decorator]
    def _batch_there(self, data: Any) -> Any:
        self._began_s = perf_counter()
        given = [data]
        self._guard(lambda: given.append(self._marked(data)))
        return given[-1]

    def _marked(self, data: Any) -> Any:
        """Return a batch as it is, once its size was told."""
        inputs = data[0] if isinstance(data, tuple) and data else data
        tensors = [part for part in tf.nest.flatten(inputs) if isinstance(part, tf.Tensor)]
        if not tensors:
            return after(data, lambda: self._guard(lambda: self._steps.batch_there(0, 0)))
        best = max(tensors, key=_tells_size)
        sizes = tf.stack([tf.shape(best, tf.int64)[0], tf.size(best, tf.int64)])

        def heard(told: Any) -> None:
            self._guard(lambda: self._steps.batch_there(int(told[0]), int(told[1])))

        with tf.control_dependencies(
            [part for part in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(part)]
        ):
            called = tf.numpy_function(heard, [sizes], [])
        operations = [] if tf.executing_eagerly() else tf.nest.flatten(called)
        with tf.control_dependencies(operations):
            return tf.nest.map_structure(
                lambda part: tf.identity(part) if tf.is_tensor(part) else part,
                data,
                expand_composites=True,
            )

    @_plain  # type: ignore[untyped-decorator]
    def _gradients_done(self, gradients: Any) -> Any:
        listed = list(gradients)
        given = [listed]
        self._guard(lambda: given.append(self._done(listed)))
        return given[-1]

    def _done(self, listed: list[Any]) -> list[Any]:
        def heard() -> None:
            self._guard(self._steps.gradients_done)

        if self._applies == "apply":
            return list(after(listed, heard))
        gradients = after([gradient for gradient, _ in listed], heard)
        return [(gradient, each[1]) for gradient, each in zip(gradients, listed, strict=True)]

    @_plain  # type: ignore[untyped-decorator]
    def _traced(self) -> None:
        """Count what was spent in Python on the step: it runs only while a graph is made."""
        if not tf.executing_eagerly():
            self._steps.compile_s += perf_counter() - self._began_s


def _tells_size(tensor: Any) -> tuple[bool, int]:
    """Tokens come first: integers with a dimension of their own; else the most dimensions."""
    return tensor.dtype.is_integer and (tensor.shape.rank or 0) > 1, tensor.shape.rank or 0
