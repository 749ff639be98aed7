"""The public face: a few lines in a training script."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import keras
import tensorflow as tf

from .._exchange._world_check import described
from .._planner import Bounds
from .._run._estimates import Estimates
from .._run._runtime import RunSettings, checked_policy, checked_reduction
from .._types import check_range
from ..exceptions import invalid
from ..policies import AbstractPolicy
from ._dataset import Batches, Kept, StateInCheckpoint, distributed
from ._fit import FitByWorkers, are_same, arrays_in, as_keras, is_arrays
from ._keras_checks import (
    check_compiled,
    check_model,
    check_optimizer,
    checked_bounds,
)
from ._keras_session import KerasSession, Runtime, Start
from ._source import source_of
from ._strategy_workers import workers_of
from ._training_steps import TrainingSteps, weave, weave_into_model, weave_into_optimizer


class Balancer:
    """Sizes every worker's share of the same global batch so that all finish together.

    Usage:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        balancer = Balancer(strategy, global_batch_size=96)
        with strategy.scope():
            model = make_model()
            model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
        model = balancer.prepare(model)
        dataset = balancer.dataset((images, labels), shuffle=True)
        model.fit(dataset, epochs=3, callbacks=[balancer.callback()])

    All workers take every step together, on the global batch that one process would take. The
    policy sizes each worker's part of it from the times measured so far. The gradient is the mean
    over that global batch, for any sizes. With one worker, the script runs unchanged.

    Right for losses that are means (or, with ``loss_reduction="sum"``, sums) over samples, with
    Keras' optimizers, one replica for each worker, on CPUs. Keras' own scaling by the number of
    replicas is taken into account: regularizers of weights count once.

    Args:
        strategy: ``tf.distribute.MultiWorkerMirroredStrategy``, with one replica a worker.
        global_batch_size: samples per optimizer step over all workers.
        policy: decides the sizes: a name (``"auto"``, ``"equal"``, ``"dynamic-batching"``,
            ``"dbs"``, ``"lb-bsp-2018"``, ``"lb-bsp-2020"``, ``"lbb"``), ``"module:Class"``, or a
            policy.
        loss_reduction: what the user's loss does over the samples of a batch. ``"mean"``: Keras'
            losses as they are, or ``tf.nn.compute_average_loss`` without a size. ``"sum"``:
            losses with ``reduction="sum"``, or divided by the global batch size; left as it is.
        bounds: limits on every worker's samples.
        runtime: heartbeats, the deadline, the progress line.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        global_batch_size: int,
        *,
        policy: str | AbstractPolicy[Any] = "auto",
        loss_reduction: Literal["mean", "sum"] = "mean",
        bounds: Bounds = Bounds(),  # noqa: B008  # a frozen value
        runtime: Runtime = Runtime(),  # noqa: B008  # a frozen value
    ) -> None:
        self._workers = workers_of(strategy)
        self._strategy = strategy
        remedy = (
            "Give the samples of a step over all workers, one sample for each worker at least; a "
            "policy goes by its name, `Balancer(policy=...)`."
        )
        rule = f"an integer of at least {self._workers.world_size}"
        check_range("Balancer(global_batch_size=...)", global_batch_size, rule, remedy)
        self._global_batch_size = global_batch_size
        self._policy = checked_policy(policy)
        self._bounds = checked_bounds(bounds)
        self._batches: Batches | None = None
        self._dataset: Any = None
        self._models: list[Any] = []
        self._optimizers: list[Any] = []
        self._kept = Kept()
        self._steps = TrainingSteps(
            self._workers.world_size,
            checked_reduction(loss_reduction),
            num_optimizers=lambda: len(self._optimizers),
        )
        self._session = KerasSession(self._workers, self._steps, runtime, self._start)
        self._made_of: list[Any] = []  # the training data, where it is arrays that `fit` was given

    def prepare(self, model: Any, *optimizers: Any) -> Any:
        """Return the model, or it and its optimizers, ready for balanced steps.

        The same objects come back: training forwards are weighted and timed, and optimizers say
        when gradients are complete. ``fit`` finds the compiled optimizer by itself; for loops of
        your own, name the optimizers here. Every worker prepares the same things.

        Args:
            model: of Keras, made under the strategy's scope; the outermost one.
            optimizers: of Keras, that a loop of your own applies gradients with.

        Raises:
            ValueError: a part cannot be balanced; the message says why and what to do instead.
        """
        self._session.check_open()
        check_model(model, self._strategy)
        for optimizer in optimizers:
            self._weave_optimizer(optimizer)
        if self._workers.world_size > 1:
            self._weave(model)
        weave(model, "fit", partial(self._fit, model))
        weave(model, "evaluate", self._evaluate)
        return (model, *optimizers) if optimizers else model

    def dataset(
        self,
        source: Any,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
        map_fn: Callable[..., Any] | None = None,
        num_parallel_calls: int | None = None,
    ) -> Any:
        """Return the training data as a distributed data set of one epoch, to be iterated again.

        Its ``cardinality`` is the number of steps, and its ``element_spec`` leaves the batch size
        open. Step k has the same samples as in one process, and each sample counts once an epoch.
        No batch is made ahead, so every batch has the newest plan's size: step k decides k + 1.
        A balancer has one data set, made in the same way on every worker.

        Args:
            source: nested tuples or dicts of arrays with equally many rows; or a
                ``tf.data.Dataset`` of single samples with a length, the same on all workers
                (shuffled by a seed), which each reads completely to keep its own samples; or a
                function from the epoch's number to such a data set, for restarts within an epoch.
            shuffle: whether to draw an order of the arrays for every epoch.
            seed: of these orders.
            drop_remainder: whether to leave out a short last batch, which has its own weights.
            map_fn: from a sample to a sample, as in ``tf.data.Dataset.map``, only for the worker's
                own samples: decoding and augmentation belong here.
            num_parallel_calls: samples on which it runs at a time; None is one per core.

        Raises:
            ValueError: the data cannot be shared out, at all or within the bounds.
            RuntimeError: there is a data set already.
        """
        self._session.check_open()
        if self._batches is not None:
            raise RuntimeError(
                "This balancer has its training data. Make a new `Balancer` for other data; for "
                "evaluation, give `Model.evaluate` the data as it is."
            )
        samples = source_of(source, shuffle=shuffle, seed=seed)
        batches = Batches(
            samples,
            self._session,
            self._workers,
            global_batch_size=self._global_batch_size,
            bounds=self._bounds,
            drop_remainder=drop_remainder,
        )
        batches.go_to(self._kept.position, self._kept.form)
        self._batches = batches
        num_parallel = num_parallel_calls or os.cpu_count() or 1
        self._dataset = distributed(batches, self._strategy, map_fn, num_parallel)
        return self._dataset

    def callback(self) -> keras.callbacks.Callback:
        """Return the callback for ``fit(callbacks=[...])``, after ``BackupAndRestore`` if any.

        It shows the balancer which epoch ``fit`` is in. So every epoch has its own order, also with
        ``keras.callbacks.BackupAndRestore`` or ``fit(initial_epoch=...)``.
        """
        return keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self.begin_epoch(epoch),
            on_epoch_end=lambda epoch, logs: self.end_epoch(),
        )

    def begin_epoch(self, epoch: int) -> None:
        """Have the next iteration hand out ``epoch``; for loops of your own that count epochs.

        Args:
            epoch: its number, from 0, which determines the order.
        """
        if self._batches is not None:
            self._batches.begin_epoch(epoch)

    def end_epoch(self) -> None:
        """End an epoch's last step, so that what follows does not count as training."""
        self._session.open().end_epoch()

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of every worker in a full step, as planned for the newest one."""
        plan = self._steps.plan
        return () if plan is None else plan.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data and, on rank 0, what was learnt about the workers."""
        kept, batches = self._kept, self._batches
        if batches is not None:
            kept = replace(kept, position=batches.position, form=batches.form)
        if self._session.is_open:
            estimates = Estimates(self._workers.hosts, self._session.learnt)
            kept = replace(kept, num_steps=self._steps.num_done, estimates=estimates)
        return kept.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was called, on any number of workers; before training.

        Raises:
            ValueError: it is not a state, or training has begun.
        """
        if self._session.is_open:
            raise invalid(
                "Balancer.load_state_dict(...)",
                "come before the first step",
                "a run that is under way",
                "Load into a new `Balancer`.",
            )
        kept = Kept.read(state)
        if self._batches is not None:
            self._batches.go_to(kept.position, kept.form)
        self._kept = kept

    def trackable(self) -> tf.train.experimental.PythonState:
        """Return the state for ``tf.train.Checkpoint(balancer=...)``."""
        return StateInCheckpoint(self.state_dict, self.load_state_dict)

    def close(self) -> None:
        """End the run on this worker, and notify the others. May be called again."""
        self._session.close()

    def __enter__(self) -> Self:
        self._session.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cause = self._session.ended_by(error)
        self.close()
        if cause is not None:
            raise cause from error

    def _fit(self, model: keras.Model, fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``fit``, which takes arrays as in plain Keras, in steps of the global batch size.

        Arrays become the training data, shuffled unless ``fit(shuffle=False)``, and the last
        ``validation_split`` of them the data that each epoch is judged on. The same arrays may be
        given again: the orders of epochs continue.
        """
        with self._session.ending():
            is_alone = self._workers.world_size == 1
            if model.compiled and not is_alone:
                check_compiled(model, self._steps.loss_reduction)
            given = inspect.signature(fit).bind(*args, **kwargs).arguments
            if is_arrays(given.get("x")):
                source, shuffle, made_of, rest = arrays_in(given, self._global_batch_size)
                if self._dataset is None or not are_same(made_of, self._made_of):
                    self.dataset(tf.nest.map_structure(as_keras, source), shuffle=shuffle)
                    self._made_of = made_of
                given = {"x": self._dataset, "shuffle": False, **rest}
            elif not (is_alone or given.get("x") is self._dataset):
                raise invalid(
                    "Model.fit(x)",
                    "be arrays, or what `balancer.dataset(...)` returned",
                    type(given.get("x")).__name__,
                    "Give a `tf.data.Dataset` of single samples to `balancer.dataset(...)` first.",
                )
            if not is_alone:
                # Before Keras makes variables: their collectives would wait for a lost worker.
                self._session.open()
            return fit(**given)

    def _evaluate(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x = inspect.signature(evaluate).bind(*args, **kwargs).arguments.get("x")
        if self._workers.world_size > 1 and x is not None and x is self._dataset:
            raise invalid(
                "Model.evaluate(x)",
                "be data as it is, in `fit(validation_data=...)` too",
                "what `balancer.dataset(...)` returned, of which every batch is trained on",
                "Give the arrays, or a `tf.data.Dataset` with its `.batch(...)`.",
            )
        return evaluate(*args, **kwargs)

    def _weave(self, model: Any) -> None:
        if any(model is known for known in self._models):
            raise invalid(
                "Balancer.prepare(model)",
                "be given each model once",
                repr(model.name),
                "Its forwards would be weighted twice.",
            )
        self._models.append(model)
        weave_into_model(model, self._steps)
        FitByWorkers(model, self._strategy, self._session, self._weave_optimizer).install()

    def _weave_optimizer(self, optimizer: Any) -> bool:
        """Make an optimizer known, if it can be balanced; return whether it was not yet."""
        if any(optimizer is known for known in self._optimizers):
            return False
        check_optimizer(optimizer)
        self._optimizers.append(optimizer)
        if self._workers.world_size > 1:
            weave_into_optimizer(optimizer, self._session.gradients_done)
        return True

    def _start(self) -> Start:
        batches, kept = self._batches, self._kept
        if batches is None:
            raise RuntimeError("`balancer.dataset(...)` comes before training.")
        source, (epoch, step) = batches.source, batches.position
        alike = {
            "`Balancer(global_batch_size=...)`": self._global_batch_size,
            "The number of samples": source.num_samples,
            "The order of samples": source.order,
            "The type and content of the samples": source.content,
            "The number of steps in an epoch": batches.num_steps,
            "`Balancer(loss_reduction=...)`": self._steps.loss_reduction,
            "`Balancer(bounds=...)`": described(self._bounds),
            "The place to begin at": f"step {step} of epoch {epoch}",
            "The number of steps done": kept.num_steps,
        }
        settings = RunSettings(self._policy, batches.job, batches.num_steps, kept.estimates)
        return settings, kept.num_steps, {name: str(value) for name, value in alike.items()}
