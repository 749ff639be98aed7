"""One step as the training loop meets it: its number, and its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..._warning import OneWarning
from ...exceptions import invalid
from ._protocols import LoaderSteps, MicroBatch


@dataclass(slots=True)
class StepCount:
    """Optimizer steps handed out so far in the run; loaders used in turn share one.

    Attributes:
        value: how many, and so the number of the next.
        begun: whether any was, in this process: from then on it only counts.
        warn: of one that was left.
    """

    value: int = 0
    begun: bool = False
    warn: OneWarning = field(default_factory=OneWarning)

    def continue_from(self, step: int) -> None:
        """Count on from what a checkpoint says; a run under way counts on as it is.

        The most of several loaders', of which one may have waited since it was resumed.
        """
        if not self.begun:  # plans are numbered by the steps
            self.value = max(self.value, step)

    def left(self, *, used: bool) -> None:
        """Warn once of a step that a loop left before its last micro-batch, after a backward."""
        if used:
            self.warn(
                "A loop over the micro-batches of a step was left before the last one, in whose "
                "backward gradients are averaged: what was accumulated differs from rank to rank, "
                "and a rank that comes to its last one waits for the others. Take all "
                "micro-batches of a step, or leave out the step as a whole, on all ranks."
            )


def with_units(
    parts: list[MicroBatch], counter: Callable[[Any], float] | None
) -> tuple[list[MicroBatch], float | None]:
    """Return a step's micro-batches with their units, and the sum; None where they are samples."""
    if counter is None:
        return parts, None
    counted = [part.counted(counter) for part in parts]
    return counted, math.fsum(part.units or 0.0 for part in counted)


class Attempts(Protocol):
    """Runs the forwards and backwards of a step, over again where memory runs out."""

    @property
    def probes(self) -> bool:
        """Whether a trial of what fits is still to come."""
        ...

    def run(
        self,
        step: int,
        parts: Sequence[MicroBatch],
        closure: Callable[[Any], torch.Tensor],
        through: Callable[[torch.Tensor], Any],
    ) -> torch.Tensor:
        """Return the mean loss over this rank's samples of a step, by its number; detached."""
        ...


def check_probed(attempts: Attempts | None) -> None:
    """Raise where a trial of what fits is still to come, and the user's own loop leaves it out.

    Raises:
        ValueError: it is.
    """
    if attempts is not None and attempts.probes:
        raise invalid(
            "Bounds(max='probe')",
            "be used with `step.backward(closure)`, which can try what fits",
            "a loop over the step's micro-batches",
            "Write `for step in loader.steps(): step.backward(lambda batch: ...)`, or give "
            "`Bounds(max=...)` a number.",
        )


class MicroBatches:
    """What a rank computes of a step, forward by forward: here all of it is known, one or more.

    Attributes:
        num_samples: samples so far.
        num_forwards: forwards so far, at least 1.
    """

    def __init__(self, parts: list[MicroBatch]) -> None:
        self._parts = parts
        self.num_samples = sum([part.num_samples for part in parts])
        self.num_forwards = len(parts)

    def __iter__(self) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield what every forward gets, and whether it is the last."""
        for left, part in enumerate(self._parts, 1 - len(self._parts)):
            yield part, left == 0

    def whole(self) -> list[MicroBatch]:
        """Return all of it, where that has to be known before the first forward."""
        return self._parts


class Step:
    """One global step of this rank: iterate over it for the micro-batches.

    Gradients are synchronised once, in the backward of the last micro-batch. ``backward`` does
    the same with the loop inside, and cuts what does not fit into memory.

    Usage:
        for step in loader.steps():
            for x, y in step:
                loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    Attributes:
        global_num_samples: the step's samples over all ranks.
        equal_forwards: whether all ranks have as many micro-batches, and know it.
        is_left: whether a loop over it has begun, and has not come to its last micro-batch.
    """

    def __init__(
        self,
        portions: MicroBatches,
        global_num_samples: int,
        *,
        listener: LoaderSteps,
        no_sync: Callable[[], AbstractContextManager[Any]],
        number: int = 0,
        attempts: Attempts | None = None,
        equal_forwards: bool = False,
    ) -> None:
        self._number = number
        self._portions = portions
        self._attempts = attempts
        self._listener = listener
        self._no_sync = no_sync
        self.global_num_samples = global_num_samples
        self.equal_forwards = equal_forwards
        self.is_left = False

    @property
    def num_samples(self) -> int:
        """This rank's samples of the step; so far, where it may claim more."""
        return self._portions.num_samples

    @property
    def num_micro_batches(self) -> int:
        """Forwards of the step on this rank, at least 1; so far, where it may claim more."""
        return self._portions.num_forwards

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """What the forwards will get, for loops that count all of it before the first forward.

        From then on the step claims no more than was planned.
        """
        return tuple(self._portions.whole())

    def backward(
        self,
        closure: Callable[[Any], torch.Tensor],
        *,
        through: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
    ) -> torch.Tensor:
        """Run forward and backward of every micro-batch, and survive running out of memory.

        What does not fit is cut into smaller parts and run again: the step keeps its samples and
        its gradient, this worker's cap falls, and training continues. With ``Bounds(max="probe")``
        the first call finds by trial how many samples fit.

        Buffers that a forward changes, such as the running statistics of BatchNorm, count samples
        that run again once more.

        Usage:
            for step in loader.steps():
                loss = step.backward(lambda batch: loss_fn(model(batch[0]), batch[1]))
                optimizer.step()
                optimizer.zero_grad()

        Args:
            closure: from a batch, as ``collate_fn`` made it, to its loss. It may be called more
                than once for a sample, and has no other effects.
            through: runs the backward of a loss: ``lambda loss: scaler.scale(loss).backward()``
                with a gradient scaler.

        Returns:
            The loss over this rank's samples, detached: their mean or, with
            ``loss_reduction="sum"``, their sum.

        Raises:
            RuntimeError: memory ran out where no smaller part would help, or where a backward
                cannot be taken back; the message says what would do.
        """
        if self._attempts is None:
            raise RuntimeError("`Step.backward` needs a model: `prepare` it with the loader.")
        return self._attempts.run(self._number, self._portions.whole(), closure, through)

    def __iter__(self) -> Iterator[Any]:
        check_probed(self._attempts)
        for part, is_last in self._portions:
            self.is_left = not is_last
            self._listener.begin_forward(self._number, part, is_last=is_last)
            if is_last:
                yield part.batch
                continue
            with self._no_sync():
                yield part.batch
