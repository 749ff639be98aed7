"""A callback that watches a plain ``fit`` on several workers, and changes nothing in it."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, final

import tensorflow as tf

from .._diagnosis import Phase
from .._run._host_reader import GarbageClock, HostReader
from .._valid import check_range
from ..tensorflow._strategy_workers import StrategyWorkers, cluster_of
from ..tensorflow._weaving import is_woven, weave
from ._courier import Courier, ends_of, say_off
from ._keras_marks import KerasMarks
from ._keras_steps import KerasSteps
from ._mail import RankHello
from ._service_store import ServiceStore, next_prefix
from ._start_watch import ALONE, WatchSettings
from ._watched_run import CallSite

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
    switches it off with one line, and training goes on.

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
        self._is_on = False
        self._own_s = 0.0
        self._workers: StrategyWorkers | None = None
        self._garbage = GarbageClock()
        self._marks: KerasMarks | None = None
        self._steps: KerasSteps | None = None
        self._courier: Courier | None = None

    def set_model(self, model: Any) -> None:
        """Put the marks there before the step is traced: Keras calls it first."""
        self.on_train_end()  # of a ``fit`` that an error left
        super().set_model(model)
        self._is_on = True
        self._heard(lambda: self._prepare(model))

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to watch."""
        self._heard(self._begin)

    def on_train_end(self, logs: Any = None) -> None:
        """Say what was seen, and leave the model as it was."""
        self._heard(self._say)
        self._stop()

    def on_test_begin(self, logs: Any = None) -> None:
        """Hear of an evaluation."""
        self._enter(Phase.EVALUATION)

    def on_test_end(self, logs: Any = None) -> None:
        """Hear of its end."""
        self._leave()

    def _prepare(self, model: Any) -> None:
        strategy = model.distribute_strategy
        self._workers = workers = cluster_of(strategy)
        if workers.world_size == 1:
            self._is_on = False
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
        self._garbage.open()
        self._steps = KerasSteps(gc_s=lambda: self._garbage.total_s)
        self._marks = KerasMarks(model, self._steps, self._heard)
        self._marks.weave()

    def _begin(self) -> None:
        workers, steps, marks = self._workers, self._steps, self._marks
        assert workers is not None
        assert steps is not None
        assert marks is not None
        marks.weave_call()
        for name in _SAVING:
            weave(self.model, name, self._saving)
        store = ServiceStore(next_prefix())
        self._courier = Courier(
            steps,
            RankHello(socket.gethostname(), _device()),
            HostReader(),
            ends_of(store, workers.rank, workers.world_size, self._settings),
            on_fault=self._switch_off,
        )
        self._courier.open()
        atexit.register(self.on_train_end)  # where an error leaves ``fit``

    def _say(self) -> None:
        """Tell the last; in a thread, since a chief that is gone never answers."""
        courier = self._courier
        if courier is None:
            return

        def close() -> None:
            try:
                sites = (CallSite("model", "", 0, "keras"),)
                courier.close("Keras", sites, own_s=lambda: self._own_s + courier.thread_s)
            except Exception as error:
                self._switch_off(error)

        thread = threading.Thread(target=close, name="evenstep-watch-end", daemon=True)
        thread.start()
        thread.join(_END_S)

    def _saving(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter(Phase.CHECKPOINT)
        try:
            return method(*args, **kwargs)
        finally:
            self._leave()

    def _enter(self, phase: Phase) -> None:
        if (steps := self._steps) is not None:
            self._heard(lambda: steps.enter(phase))

    def _leave(self) -> None:
        if (steps := self._steps) is not None:
            self._heard(steps.leave)

    def _heard(self, call: Callable[[], None]) -> None:
        """Have a fault of the watch's own switch it off, whatever is under way."""
        if self._is_on:
            begin = perf_counter()
            try:
                call()
            except Exception as error:
                self._switch_off(error)
            self._own_s += perf_counter() - begin

    def _switch_off(self, error: BaseException) -> None:
        if self._is_on:
            self._is_on = False
            say_off(None if self._workers is None else self._workers.rank, error)
            self._garbage.close()
            if self._courier is not None:
                self._courier.stop()

    def _stop(self) -> None:
        self._is_on = False
        atexit.unregister(self.on_train_end)
        self._garbage.close()
        if self._courier is not None:
            self._courier.stop()
        if self._marks is not None:
            for name in _SAVING:
                self.model.__dict__.pop(name, None)
            self._marks.unweave()
        self._courier = self._marks = self._steps = None


def _device() -> str:
    return "gpu" if tf.config.list_logical_devices("GPU") else "cpu"
