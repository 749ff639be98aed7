"""A callback that watches a plain ``fit`` on several workers, and changes nothing in it.

Marks in the graph of a training step say when the own batch, all batches and own gradients are
there. TensorFlow's coordination service carries the workers' reports.
"""

from __future__ import annotations

import atexit
import base64
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, final

import tensorflow as tf
from tensorflow.python.distribute import input_lib  # not public: it asks whether all have a batch
from tensorflow.python.eager import context  # not public: it has the service

from .._diagnosis import Phase, StepClues, time_by_phase
from .._host import GarbageClock, HostReader
from .._types import check_range
from ..tensorflow._strategy_workers import cluster_of, next_prefix
from ..tensorflow._training_steps import after, is_woven, weave
from ._courier import RecordSender, say_off
from ._start_watch import ALONE, WatchSettings
from ._step_records import StepRecord
from ._watched_run import CallSite


@final
class KerasSteps:
    """Marks where the time of a worker's steps goes, by what is called in and around the graph.

    A step lasts from the begin of a call of the model's ``train_function`` to the next one's. In
    it the worker fetches its own batch, asks whether all have one (a meeting), computes up to its
    complete gradients, and sums them with the others. What follows in the graph, the optimizer
    and the sums of metrics, counts as reduction: how long it takes by itself is not known.

    Args:
        record: takes a step that is over.
        gc_s: seconds of garbage collection so far.
        now: a monotonic clock in seconds.

    Attributes:
        step: the one under way, from 0.
        compile_s: seconds of tracing so far, to be counted on by the caller.
    """

    def __init__(
        self,
        record: Callable[[StepRecord], None],
        *,
        gc_s: Callable[[], float],
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.step = 0
        self._record = record
        self.compile_s = 0.0
        self._gc_s, self._now = gc_s, now
        self._gc_before, self._compile_before = gc_s(), 0.0
        self._cuts: list[tuple[float, Phase]] = []  # of the step under way
        self._is_inside = False  # of a call of ``train_function``
        self._num_samples = self._size = 0
        self._blocks: list[Phase] = []  # that are open, such as an evaluation

    @property
    def phase(self) -> Phase:
        """The phase under way."""
        return self._cuts[-1][1] if self._cuts else Phase.REST

    def begin(self) -> None:
        """End the step before, if any, and begin one: its batch is about to be fetched."""
        if self._cuts:
            self._end_step()
        self._cuts = []
        self._blocks.clear()
        self._is_inside = True
        self._cut(Phase.INPUT)

    def fetched(self) -> None:
        """Note that the own batch is there, and the others are to be asked for theirs."""
        if self._is_inside:
            self._cut(Phase.MEETING)

    def batch_there(self, num_samples: int, size: int) -> None:
        """Note that all have one.

        Raises:
            ValueError: it is the second one of the step.
        """
        if not self._is_inside:
            return
        if any(phase is Phase.FORWARD for _, phase in self._cuts):
            raise ValueError("several steps in one call: leave out `steps_per_execution`")
        self._num_samples, self._size = num_samples, size
        self._cut(Phase.FORWARD)

    def gradients_done(self) -> None:
        """Note that the own gradients are complete."""
        if self._is_inside:
            self._cut(Phase.REDUCTION)

    def end(self, *, is_whole: bool) -> None:
        """Note that the call is over.

        Args:
            is_whole: whether it was a step; else the data had an end.

        Raises:
            ValueError: no gradient was seen in a step.
        """
        self._is_inside = False
        if is_whole and all(phase is not Phase.REDUCTION for _, phase in self._cuts):
            raise ValueError("no gradient came to the compiled optimizer's `apply_gradients`")
        self._cut(Phase.REST)

    def enter(self, phase: Phase) -> None:
        """Note that something else begins, such as an evaluation; the outermost one counts."""
        if not self._is_inside and self._cuts:
            if not self._blocks:
                self._cut(phase)
            self._blocks.append(phase)

    def leave(self) -> None:
        """Note that it is over."""
        if self._blocks:
            self._blocks.pop()
            if not self._blocks:
                self._cut(Phase.REST)

    def _cut(self, phase: Phase) -> None:
        self._cuts.append((self._now(), phase))

    def _end_step(self) -> None:
        self._cut(Phase.REST)
        lasted_s = [end - begin for (begin, _), (end, _) in pairwise(self._cuts)]
        phases = [phase for _, phase in self._cuts[:-1]]
        gc_s = self._gc_s()
        clues = StepClues(
            gc_us=round((gc_s - self._gc_before) * 1e6),
            compile_us=round((self.compile_s - self._compile_before) * 1e6),
            size=self._size,
        )
        self._gc_before, self._compile_before = gc_s, self.compile_s
        spent_us = time_by_phase(lasted_s, phases)
        if Phase.REDUCTION in phases:
            self._record(StepRecord(self.step, 1, spent_us, clues, self._num_samples))
            self.step += 1


_WAIT_MS = 20  # for a key that may not be there: the service has no way to ask without a wait


@final
class ServiceStore:
    """Small keys, as a ``torch.distributed.Store`` has them, and no collective of TensorFlow's."""

    def __init__(self) -> None:
        self._service = context.context()
        self._prefix = next_prefix(self._service)

    def set(self, key: str, value: bytes) -> None:
        """Write a key; the service writes none twice, so what is there is deleted first."""
        self.delete_key(key)
        self._service.set_config_key_value(self._name(key), base64.b64encode(value).decode())

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        try:
            return all(self.get(key) is not None for key in keys)
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
            return False

    def get(self, key: str) -> bytes:
        """Return a key that is there."""
        return base64.b64decode(self._service.get_config_key_value(self._name(key), _WAIT_MS))

    def delete_key(self, key: str) -> None:
        """Delete a key."""
        self._service.delete_config_key_value(self._name(key))

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"


_ASKS_ALL = "_calculate_replicas_with_values"
_plain = tf.autograph.experimental.do_not_convert  # what is the user's is converted as before


@final
class KerasMarks:
    """Has a model's training step call back while its graph runs; values stay as they are.

    What is called in the graph is called after what it marks, and before what comes next. Tensors
    pass through identities. The next ``fit`` traces the step anew, with the marks or without.

    Args:
        model: compiled.
        steps: is notified of the marks.
        guard: runs what is called back, so that no fault reaches the training.
    """

    def __init__(self, model: Any, steps: KerasSteps, guard: Callable[..., None]) -> None:
        self._model, self._steps, self._guard = model, steps, guard
        self._optimizer = model.optimizer
        self._asks_all = getattr(input_lib, _ASKS_ALL)
        self._began_s = 0.0

    def weave(self) -> None:
        """Put the marks there, before the step is traced."""
        weave(self._model, "train_step", self._train_step)
        weave(self._optimizer, "apply_gradients", self._apply)
        self._model.train_function = None
        setattr(input_lib, _ASKS_ALL, self._ask_all)

    def unweave(self) -> None:
        """Leave everything as it was."""
        for part, name in ((self._model, "train_step"), (self._optimizer, "apply_gradients")):
            vars(part).pop(name, None)
        self._model.train_function = None
        if getattr(input_lib, _ASKS_ALL) == self._ask_all:
            setattr(input_lib, _ASKS_ALL, self._asks_all)

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Mark the begin and the end of a step, around what Keras calls for one."""
        self._guard(self._steps.begin)
        is_whole = False
        try:
            result = method(*args)
            is_whole = True
            return result
        finally:
            self._guard(partial(self._steps.end, is_whole=is_whole))

    def _train_step(self, method: Callable[..., Any], data: Any) -> Any:
        self._began_s = perf_counter()
        logs = method(self._marked(self._sized, data))
        self._traced()
        return logs

    def _apply(self, method: Callable[..., Any], gradients: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(gradients)
        marked = self._marked(self._done, [gradient for gradient, _ in pairs])
        variables = [variable for _, variable in pairs]
        return method(list(zip(marked, variables, strict=True)), *args, **kwargs)

    @_plain  # type: ignore[untyped-decorator]
    def _marked(self, mark: Callable[[Any], Any], given: Any) -> Any:
        """Return what was given as it comes after a mark; without one where that fails."""
        found = [given]
        self._guard(lambda: found.append(mark(given)))
        return found[-1]

    @_plain  # type: ignore[untyped-decorator]
    def _ask_all(self, strategy: Any, input_workers: Any, optionals: Any) -> Any:
        fetched: list[Any] = []
        self._guard(lambda: fetched.append(self._fetched(optionals)))
        with tf.control_dependencies([] if tf.executing_eagerly() else fetched):
            return self._asks_all(strategy, input_workers, optionals)

    def _fetched(self, optionals: Any) -> Any:
        there = [optional.has_value() for each in optionals for optional in each]
        return after(there, partial(self._guard, self._steps.fetched))[0]

    def _sized(self, data: Any) -> Any:
        """Return a batch as it is, once its size was reported."""
        inputs = data[0] if isinstance(data, tuple) and data else data
        tensors = [part for part in tf.nest.flatten(inputs) if isinstance(part, tf.Tensor)]
        if not tensors:
            return after(data, partial(self._guard, self._steps.batch_there, 0, 0))
        best = max(tensors, key=_tells_size)
        sizes = tf.stack([tf.shape(best, tf.int64)[0], tf.size(best, tf.int64)])

        def sized(sizes: Any) -> None:
            self._guard(self._steps.batch_there, *map(int, sizes))

        return after(data, sized, sizes)

    def _done(self, gradients: list[Any]) -> Any:
        return after(gradients, partial(self._guard, self._steps.gradients_done))

    @_plain  # type: ignore[untyped-decorator]
    def _traced(self) -> None:
        """Count what was spent in Python on the step: it runs only while a graph is made."""
        if not tf.executing_eagerly():
            self._steps.compile_s += perf_counter() - self._began_s


def _tells_size(tensor: Any) -> tuple[bool, int]:
    """Tokens come first: integers with a dimension of their own; else the most dimensions."""
    return tensor.dtype.is_integer and (tensor.shape.rank or 0) > 1, tensor.shape.rank or 0


_END_S = 5.0  # for which the end of a ``fit`` waits at most, whatever the service does
_SAVING = ("save", "save_weights")


@final
class KerasWatch(tf.keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Says who waits for whom in a ``fit`` of Keras on several workers, and why.

    Usage:
        from evenstep.watch import KerasWatch

        model.fit(dataset, epochs=3, callbacks=[KerasWatch()])

    It only observes: losses are the same bit by bit. Rank 0 writes a line now and then, and a
    summary at the end of the ``fit``. Every worker gives the callback. Any fault of its own
    switches it off with one line, and training continues.

    Right for ``tf.distribute.MultiWorkerMirroredStrategy`` with one replica a worker, on CPUs.

    Args:
        every_s: seconds between two lines on rank 0's standard error; 0 writes none.
        run_dir: folder for rank 0's ``events.jsonl``; None writes none.
    """

    def __init__(
        self, *, every_s: float = 10.0, run_dir: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        rule, remedy = "finite and at least 0", "0 writes no lines."
        check_range("KerasWatch(every_s=...)", every_s, rule, remedy)
        self._settings = WatchSettings(every_s, "" if run_dir is None else os.fspath(run_dir))
        self._garbage = GarbageClock()
        self._rank: int | None = None
        self._parts: tuple[RecordSender, KerasSteps, KerasMarks] | None = None

    def set_model(self, model: Any) -> None:
        """Put the marks there before the step is traced: Keras calls it first."""
        self.on_train_end()  # of a ``fit`` that an error left
        super().set_model(model)
        try:
            self._prepare(model)
        except Exception as error:
            say_off(self._rank, error)

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to watch."""
        if self._parts is not None:
            self._parts[0].guard(self._begin, *self._parts)

    def on_train_end(self, logs: Any = None) -> None:
        """Say what was seen, and leave the model as it was."""
        if self._parts is None:
            return
        (courier, _, marks), self._parts = self._parts, None
        atexit.unregister(self.on_train_end)
        courier.guard(self._say, courier)
        courier.stop()
        for name in _SAVING:
            self.model.__dict__.pop(name, None)
        marks.unweave()

    def on_test_begin(self, logs: Any = None) -> None:
        """Note that an evaluation begins."""
        self._enter(Phase.EVALUATION)

    def on_test_end(self, logs: Any = None) -> None:
        """Note that it ends."""
        self._leave()

    def _prepare(self, model: Any) -> None:
        strategy = model.distribute_strategy
        workers = cluster_of(strategy)
        self._rank = workers.rank
        if workers.world_size == 1:
            print(ALONE, file=sys.stderr, flush=True)
            return
        if strategy.num_replicas_in_sync != workers.world_size:
            raise ValueError("several replicas in one worker cannot be told apart")
        if getattr(model, "jit_compile", False) is True:
            raise ValueError("XLA knows no clock: `compile(jit_compile=False)` can be watched")
        if is_woven(model, "call"):
            # The marks would take the place of the balancer's in the optimizer, now or later.
            raise ValueError(
                "a `Balancer` trains this model, and measures it itself: leave `KerasWatch` out, "
                "and give the balancer `Runtime(run_dir=...)`"
            )
        courier = RecordSender(ServiceStore(), workers.rank, workers.world_size, self._settings)
        courier.on_stop = self._garbage.close
        self._garbage.open()
        steps = KerasSteps(courier.records.append, gc_s=lambda: self._garbage.total_s)
        marks = KerasMarks(model, steps, courier.guard)
        self._parts = courier, steps, marks
        courier.guard(marks.weave)

    def _begin(self, courier: RecordSender, steps: KerasSteps, marks: KerasMarks) -> None:
        weave(self.model, "train_function", marks.call)
        for name in _SAVING:
            weave(self.model, name, self._saving)
        device = "gpu" if tf.config.list_logical_devices("GPU") else "cpu"
        courier.open(device, HostReader().read, phase=lambda: steps.phase)
        atexit.register(self.on_train_end)  # where an error leaves ``fit``

    def _say(self, courier: RecordSender) -> None:
        """Send the last report; in a thread, since a chief that is gone never answers."""
        sites = (CallSite("model", "", 0, "keras"),)
        end = threading.Thread(
            target=courier.close, args=("Keras", sites), name="evenstep-watch-end", daemon=True
        )
        end.start()
        end.join(_END_S)

    def _saving(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter(Phase.CHECKPOINT)
        try:
            return method(*args, **kwargs)
        finally:
            self._leave()

    def _enter(self, phase: Phase) -> None:
        if self._parts is not None:
            courier, steps, _ = self._parts
            courier.guard(steps.enter, phase)

    def _leave(self) -> None:
        if self._parts is not None:
            courier, steps, _ = self._parts
            courier.guard(steps.leave)
