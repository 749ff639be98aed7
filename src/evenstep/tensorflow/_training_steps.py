"""One worker's way through a step: hand-out, weight, own time, report, next plan.

The weight at the output and the clock around it are put into the training graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, final

import keras
import numpy as np
import tensorflow as tf

from .._exchange._exchange import Exchange
from .._exchange._internal import ALL_EQUAL, fault_in_words, log_fault
from .._exchange._message_kinds import StepReports
from .._planner import Plan, Report
from .._run._machine_reader import MachineReader, read_by
from .._run._step_state import StepState
from ..exceptions import invalid


@final
class TrainingSteps:
    r"""Stands between the data set, what is woven into the training graph, and the exchange.

    The clock runs while own samples are mapped, and from the first forward of a step until its
    gradients are complete. It stands while they are summed over the workers. So a wait for others
    is never this worker's own time, and neither is what a training step does before its forward.

    A forward of $n$ samples weighs $n W / N$ in a step of $N$ samples on $W$ workers: then the
    mean over workers of their means is the mean over the global batch.

    The report goes out where optimizers are called as often as in the step before, in the first
    step once for each of them, else at the plan point, late but complete.

    Step k always decides k + 1. Messages go over connections of their own, and never through
    TensorFlow's collectives: those have to be issued in the same order everywhere, and name
    no worker when one dies.

    Args:
        world_size: number of workers. Into a model that trains alone nothing is woven: there, a
            batch counts as trained on when the next one is asked for.
        loss_reduction: ``"mean"`` or ``"sum"``, what the user's loss does over samples.
        num_optimizers: returns how many optimizers are known by now.
        clock: seconds that only grow.

    Attributes:
        world_size: as given; ``loss_reduction`` likewise.
        plan: of the step under way, or of the last one; that of all for one worker alone.
        num_steps: finished steps, counted over the run.
        forwarding: name of the model whose forward is being traced; None outside of one.
        is_resting: whether forwards are none of training just now.
    """

    def __init__(
        self,
        world_size: int,
        loss_reduction: str,
        *,
        num_optimizers: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.world_size = world_size
        self.loss_reduction = loss_reduction
        self._clock = clock
        self._exchange: Exchange | None = None
        self._machine: MachineReader | None = None
        self._step: StepState | None = None
        self._compute_s = 0.0  # own work of the step so far
        self._since_s: float | None = None  # when the clock was started; None while it stands
        self._weight = 1.0
        self._foreseen = num_optimizers  # how often optimizers are called in a step
        self._handed_out_s: float | None = None
        self.plan: Plan | None = None
        self.num_steps = 0
        self.forwarding: str | None = None
        self.is_resting = False

    def begin(self, exchange: Exchange, machine: MachineReader | None = None) -> None:
        """Begin a run of several workers; one alone has its plan, and no exchange."""
        self._exchange, self._machine = exchange, machine

    @property
    def is_under_way(self) -> bool:
        """Whether a batch was handed out whose gradients are not yet there."""
        return self._step is not None and not self._step.num_backwards

    @property
    def num_done(self) -> int:
        """Steps whose gradients are there, counted over the run."""
        return self.num_steps + (self._step is not None and not self.is_under_way)

    @property
    def num_samples(self) -> int:
        """Samples of the step under way over all workers; 0 outside of one."""
        return 0 if self._step is None else self._step.global_num_samples

    def next_plan(self) -> Plan:
        """Finish the step under way and return the plan of the next: the plan point.

        Raises:
            RuntimeError: the batch before was not trained on, or not by what was prepared.
            WorkerLostError: a worker was lost.
        """
        self._finish()
        if self._exchange is not None:
            self.plan = self._exchange.at(self.num_steps)
            self._exchange.lost_ranks.check()
        assert self.plan is not None, "the run has begun"
        return self.plan

    def begin_step(self, num_samples: int, *, global_num_samples: int, data_s: float) -> None:
        """Open a step: its batch is about to be handed out."""
        if self._exchange is None:
            self.num_steps += 1
            return
        now_s = self._clock()
        wall_s = None if self._handed_out_s is None else now_s - self._handed_out_s
        self._handed_out_s = now_s
        self._compute_s, self._since_s = 0.0, None
        self._step = StepState(self.num_steps, num_samples, global_num_samples, data_s, wall_s)
        self._weight = 1.0
        if self.loss_reduction == "mean":
            self._weight = num_samples * self.world_size / global_num_samples

    def begin_forward(self) -> float:
        """Start the clock, and return the weight of this forward; 1 outside of a step."""
        if self._step is not None and not self._step.reported:
            self._step.num_forwards += 1
        self.begin_work()
        return self._weight

    def begin_work(self) -> None:
        """Start the clock, if it stands: what comes now is this worker's own."""
        if self._step is not None and not self._step.reported and self._since_s is None:
            self._since_s = self._clock()

    def end_work(self) -> None:
        """Stop the clock, if it runs."""
        if self._since_s is not None:
            self._compute_s += self._clock() - self._since_s
            self._since_s = None

    def gradients_done(self) -> None:
        """Stop the clock: what comes next is a wait for the others.

        Raises:
            RuntimeError: the batch is none that was handed out.
            WorkerLostError: a worker was lost, or has ended its run before this step.
        """
        step, exchange = self._step, self._exchange
        if step is None or exchange is None:
            raise RuntimeError(
                "The balanced model was trained on a batch that its `Balancer` did not hand out: "
                "train on what `balancer.dataset(...)` returned."
            )
        self.end_work()
        exchange.lost_ranks.enter_collective()
        exchange.need_all(step.number)
        step.num_backwards += 1
        if step.num_backwards == self._foreseen() and not step.reported:
            self._report(step, exchange)

    def end_epoch(self) -> None:
        """Close the last step of an epoch: what follows is not training, and has no weight."""
        self._finish()
        self._handed_out_s = None
        if self._exchange is not None:
            self._exchange.lost_ranks.leave_collective()

    def close(self) -> None:
        """Have the last step reported, as if it had been an epoch's last, if it was trained on."""
        if not self.is_under_way:
            self._finish()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Have forwards pass for none of training in the block: an evaluation is traced."""
        before, self.is_resting = self.is_resting, True
        try:
            yield
        finally:
            self.is_resting = before

    def _finish(self) -> None:
        step, self._step, self._weight = self._step, None, 1.0
        if step is None or self._exchange is None:
            return
        if not (step.num_forwards and step.num_backwards):
            missing = "model" if step.num_backwards else "optimizer"
            raise RuntimeError(
                f"The batch of step {step.number} was handed out, and the balancer saw no call of "
                f"its {missing}. Prepare both, `balancer.prepare(model, optimizer)`, and train on "
                f"every batch, without `training=False`. If you only need shapes, use "
                f"`dataset.element_spec`. In a `tf.function`, call `next(iterator)` instead of a "
                f"`for` over the data."
            )
        if not step.reported:
            self._report(step, self._exchange)
        self._foreseen = lambda: step.num_backwards
        self.num_steps += 1

    def _report(self, step: StepState, exchange: Exchange) -> None:
        step.reported = True
        free, fault = self._free()
        free_cpu, free_memory_bytes = free or (None, 0)
        report = Report(
            step=step.number,
            batch_size=step.num_samples,
            global_num_samples=step.global_num_samples,
            compute_s=self._compute_s,
            data_s=step.data_s,
            wall_s=step.wall_s,
            free_cpu=free_cpu,
            free_memory_bytes=free_memory_bytes,
            fault=fault,
        )
        messages = (StepReports(step.number, (report,)),)
        exchange.report(step.number, lambda: messages)
        exchange.last_reduced = step.number - 1  # every optimizer's step before has summed

    def _free(self) -> tuple[tuple[float, int] | None, str]:
        """Return what the machine has to spare; once, why it cannot be read, and never again."""
        if self._machine is None:
            return None, ""
        try:
            return read_by(self._machine), ""
        except Exception as error:
            self._machine = None
            log_fault(self.num_steps, error, ALL_EQUAL)
            return None, fault_in_words(error)


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


def after(nested: Any, call: Callable[..., None], *given: tf.Tensor) -> Any:
    """Return what is nested as it is, once all of it was there and the call was made after it.

    Args:
        nested: tensors, and whatever else.
        call: called once a step, when the graph runs.
        given: what it is called with.
    """
    parts = tf.nest.flatten(nested, expand_composites=True)
    with tf.control_dependencies([part for part in parts if tf.is_tensor(part)]):
        called = tf.numpy_function(call, list(given), [])
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
    """Return whether a method was replaced by ``weave``."""
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
        waiting.extend(
            outer
            for outer, inner in outside
            if inner is source and hasattr(outer, "op") and not hasattr(outer, "numpy")
        )
        waiting.extend(operation.inputs)
    return None


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
