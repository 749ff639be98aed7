"""``model.fit`` as a balancer runs it: on its data set, or on arrays that become one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, final

import keras
import numpy as np
import tensorflow as tf

from ..exceptions import invalid
from ._keras_checks import check_compiled
from ._keras_session import KerasSession
from ._weaving import weave

_SPLIT = "Model.fit(validation_split=...)"


@final
class Fit:
    """Has ``fit`` take arrays as in plain Keras, in steps of the balancer's global batch size.

    Arrays become the balancer's training data, shuffled unless ``fit(shuffle=False)``, and the last
    ``validation_split`` of them the data that each epoch is judged on. The same arrays may be given
    again: the orders of epochs go on.
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
