"""The batches of this worker, each sized by the newest plan, and the state that a restart needs."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

from .._planner import Bounds, Job, Plan
from .._run._estimates import Estimates
from .._types import IntArray
from ..exceptions import invalid
from ..solve._deal import Deal
from ._keras_session import KerasSession
from ._source import Source
from ._strategy_workers import StrategyWorkers
from ._training_steps import TrainingSteps, after

_FORMAT = "evenstep-tensorflow-3"


Position = tuple[int, int]
"""A place in the order of all epochs: the epoch, from 0, and how many steps of it are done."""


@dataclass(frozen=True, slots=True)
class Kept:
    """All that a restart continues from.

    Attributes:
        position: where an interrupted run continues.
        num_steps: steps done in the run.
        form: what the steps of the epochs are cut from, in words: a place within one means nothing
            in another. None before there was data.
        estimates: what was learnt about the workers, by host.
    """

    position: Position = (0, 0)
    num_steps: int = 0
    form: str | None = None
    estimates: Estimates = field(default_factory=Estimates)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as nested dicts and lists of plain values."""
        return {
            "format": _FORMAT,
            "epoch": self.position[0],
            "step": self.position[1],
            "num_steps": self.num_steps,
            "form": self.form,
            "estimates": self.estimates.state_dict(),
        }

    @classmethod
    def read(cls, state: Any) -> Kept:
        """Return what ``state_dict`` wrote.

        Raises:
            ValueError: it is something else, or broken.
        """
        try:
            numbers = epoch, step, num_steps = [
                state[name] for name in ("epoch", "step", "num_steps")
            ]
            if state["format"] != _FORMAT or any(type(n) is not int or n < 0 for n in numbers):
                raise ValueError(f"it is not of the format {_FORMAT!r}")
            if step and type(state["form"]) is not str:
                raise ValueError("it is a place within an unknown epoch")
            estimates = Estimates.read(state["estimates"])
        except Exception as error:  # what is no state fails in every way there is
            raise invalid(
                "Balancer.load_state_dict(state=...)",
                "come from `Balancer.state_dict()`",
                reprlib.repr(state)[:80],
                "Load the part of the checkpoint that holds the balancer's state.",
            ) from error
        return cls((epoch, step), num_steps, state["form"], estimates)


class StateInCheckpoint(tf.train.experimental.PythonState):  # type: ignore[misc]
    """A balancer's state as a text in a checkpoint of TensorFlow's."""

    def __init__(
        self, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]
    ) -> None:
        self._save = save
        self._load = load

    def serialize(self) -> str:
        """Return the state."""
        return json.dumps(self._save())

    def deserialize(self, string_value: str | bytes) -> None:
        """Have the balancer continue from it."""
        self._load(json.loads(string_value))


class Batches:
    """Iterates over the steps of an epoch, anew each time, and takes up plans at each of them.

    Step $k$ has positions $[kB, (k+1)B)$ of the source's order, whatever the plan: it only says
    who computes which of them. Every worker asks for every plan and moves the same slots, so all
    agree on their owners. Nothing is made ahead: what is handed out has the newest plan's size.

    Attributes:
        num_steps: of an epoch.
        job: what is planned for.
        form: what its steps are cut from, in words.
        source: of the samples.
        session: of the run.
    """

    def __init__(
        self,
        source: Source,
        session: KerasSession,
        workers: StrategyWorkers,
        *,
        global_batch_size: int,
        drop_remainder: bool = False,
        bounds: Bounds = Bounds(),  # noqa: B008  # a frozen value
    ) -> None:
        full, rest = divmod(source.num_samples, global_batch_size)
        tail_size = 0 if drop_remainder else rest
        self.num_steps = full + bool(tail_size)
        if not self.num_steps:
            raise invalid(
                "Balancer(global_batch_size=...)",
                f"be at most the {source.num_samples} samples of an epoch with `drop_remainder`",
                global_batch_size,
                "Lower it, or keep the remainder.",
            )
        self.job = Job(workers.world_size, global_batch_size, tail_size=tail_size, bounds=bounds)
        self.job.cluster(self.job.caps())  # on every worker, rather than later on rank 0 alone
        self.form = (
            f"an epoch of {source.num_samples} samples in steps of {global_batch_size}, "
            f"{source.order}"
        )
        self.source = source
        self._rank = workers.rank
        self.session = session
        self._deal: Deal | None = None
        self._next: Position = (0, 0)
        self._handed_out: Position | None = None  # the step that was, and perhaps is not done

    @property
    def position(self) -> Position:
        """Where an interrupted run continues."""
        if self._handed_out is None:
            return self._next
        epoch, step = self._handed_out
        done = step + (not self.session.steps.is_under_way)
        return epoch + done // self.num_steps, done % self.num_steps

    def go_to(self, position: Position, form: str | None = None) -> None:
        """Begin there at the next iteration.

        Raises:
            ValueError: it is within an epoch of another form.
        """
        if position[1] and form not in (None, self.form):
            raise invalid(
                "Balancer.load_state_dict(state=...)",
                f"be of {self.form}, as it is a place within an epoch",
                form,
                "Go on with the data, the seed and the global batch size of then, or begin a new "
                "epoch: `state_dict()` after an epoch's end fits any.",
            )
        self._next, self._handed_out = position, None

    def begin_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` at the next iteration, or continue it if that was asked for."""
        if self._next[0] != epoch or self._handed_out is not None:
            self.go_to((epoch, 0))

    def __call__(self) -> Iterator[Any]:
        """Yield this worker's batches of one epoch."""
        with self.session.noting():
            steps = self.session.open()
            steps.end_epoch()  # of one that was not read to its end
            (epoch, first), self._next = self._next, (self._next[0] + 1, 0)
            size = self.job.global_batch_size
            self.source.begin(epoch, first * size, num_samples=size)
            for step in range(first, self.num_steps):
                yield self._step(steps, (epoch, step))
            steps.end_epoch()

    def _step(self, steps: TrainingSteps, position: Position) -> Any:
        """Return this worker's batch of a step, which begins with that."""
        is_last = position[1] == self.num_steps - 1
        is_short = is_last and bool(self.job.tail_size)
        slots = self._slots(steps.next_plan(), is_short=is_short)
        began_s = perf_counter()
        batch = self.source.take(slots)
        data_s = perf_counter() - began_s
        if is_last and (rows := self.source.end()) is not None:
            self.session.compare(rows)  # raises if workers have read other samples in the epoch
        self._handed_out = position
        num_samples = self.job.tail_size if is_short else self.job.global_batch_size
        steps.begin_step(len(slots), global_num_samples=num_samples, data_s=data_s)
        return batch

    def _slots(self, plan: Plan, *, is_short: bool) -> IntArray:
        if is_short:
            assert plan.tail is not None
            return Deal.fresh(np.array(plan.tail)).slots(self._rank)
        sizes = np.array(plan.batch_size)
        self._deal = Deal.fresh(sizes) if self._deal is None else self._deal.move(sizes)
        return self._deal.slots(self._rank)


def distributed(
    batches: Batches,
    strategy: tf.distribute.Strategy,
    map_fn: Callable[..., Any] | None,
    num_parallel: int,
) -> Any:
    """Return the batches as ``strategy`` wants them, with nothing made ahead on the way."""
    signature = batches.source.signature
    rows = tf.nest.map_structure(
        lambda spec: tf.TensorSpec((None, *spec.shape), spec.dtype), signature
    )

    def make(*functions: Callable[..., Any]) -> tf.data.Dataset:
        data = tf.data.Dataset.counter().map(_called(batches, rows))
        data = data.take_while(lambda is_one, batch: is_one)
        data = data.map(lambda is_one, batch: batch)
        if map_fn is not None:
            data = data.map(_mapped(map_fn, signature, num_parallel, batches.session.steps))
        for function in functions:
            data = data.map(function)
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.inject_prefetch = False
        return data.with_options(options)

    return _unbuffered(make, strategy, batches.num_steps)


def _unbuffered(
    make: Callable[..., tf.data.Dataset],
    strategy: tf.distribute.Strategy,
    num_steps: int,
    *functions: Callable[..., Any],
) -> Any:
    """Return what ``make`` makes of some functions on batches, as ``strategy`` wants it."""
    # A buffer would hold batches of plans that are old by the time they are trained on.
    unbuffered = tf.distribute.InputOptions(
        experimental_fetch_to_device=False, experimental_per_replica_buffer_size=0
    )
    data = strategy.distribute_datasets_from_function(lambda _: make(*functions), unbuffered)
    # Not by `assert_cardinality`: an epoch that is resumed in the middle has fewer.
    data._cardinality = num_steps
    if isinstance(data, tf.data.Dataset):  # of a single worker
        data.cardinality = lambda: tf.constant(num_steps, tf.int64)
    # All workers have as many steps: no need to ask, in each of them, which have some left.
    data._enable_get_next_as_optional = False
    # For `fit(class_weight=...)`, which maps batches to ones with weights, and then wants a buffer.
    data.map = lambda function: _unbuffered(make, strategy, num_steps, *functions, function)
    if functions:
        data.prefetch = lambda buffer_size: data
    return data


def _called(batches: Callable[[], Iterator[Any]], rows: Any) -> Callable[[Any], Any]:
    """Return what gives for the number of a batch whether there is one, and the batch.

    Not by ``from_generator``: that calls Python once more when an iterator is destroyed, and at
    the end of a process, after an error in ``fit``, no worker would answer.
    """
    specs = tf.nest.flatten(rows)
    iterating: list[Iterator[Any]] = []

    def call(number: Any) -> list[Any]:
        if number == 0:
            iterating[:] = [iter(batches())]
        batch = next(iterating[0], None)
        if batch is not None:
            return [np.True_, *tf.nest.flatten(batch)]
        return [np.False_, *(np.zeros((0, *s.shape[1:]), s.dtype.as_numpy_dtype) for s in specs)]

    def on_number(number: tf.Tensor) -> Any:
        is_one, *parts = tf.numpy_function(call, [number], [tf.bool, *(s.dtype for s in specs)])
        is_one.set_shape(())
        for part, spec in zip(parts, specs, strict=True):
            part.set_shape(spec.shape)
        return is_one, tf.nest.pack_sequence_as(rows, parts)

    return on_number


def _mapped(
    map_fn: Callable[..., Any], signature: Any, num_parallel: int, steps: TrainingSteps
) -> Callable[..., Any]:
    """Return ``map_fn`` for batches, some samples at a time, and measured."""
    is_tuple = isinstance(signature, tuple)
    zeros = tf.nest.map_structure(
        lambda spec: tf.zeros([size or 1 for size in spec.shape], spec.dtype), signature
    )
    one = tf.data.Dataset.from_tensors(zeros).map(map_fn)

    def on_sample(sample: Any) -> Any:
        return map_fn(*sample) if is_tuple else map_fn(sample)

    def on_batch(*batch: Any) -> Any:
        batch = after(batch, steps.begin_work)
        mapped = tf.map_fn(
            on_sample,
            batch if is_tuple else batch[0],
            fn_output_signature=one.element_spec,
            parallel_iterations=num_parallel,
        )
        return after(mapped, steps.end_work)

    return on_batch
