"""``fit`` and ``evaluate`` under several workers, which Keras 3 cannot do by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import keras
import numpy as np
import tensorflow as tf

from ..exceptions import invalid
from ._keras_checks import check_compiled, guard_losses
from ._keras_session import KerasSession
from ._reported import Reports
from ._weaving import check_is_unmasked, weave


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
