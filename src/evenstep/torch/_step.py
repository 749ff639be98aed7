"""One step as the training loop meets it: where it lies, and its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ._protocols import StepListener


@dataclass(slots=True)
class StepCount:
    """Optimizer steps handed out so far in the run; loaders used in turn share one.

    Attributes:
        value: how many, and so the number of the next.
    """

    value: int = 0


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Where a step lies in the run and in its epoch's order.

    Attributes:
        step: optimizer step, counted over the run, from 0.
        first: its first position in the order.
        num_samples: how many positions it has over all ranks.
    """

    step: int
    first: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward gets.

    Attributes:
        batch: as the user's ``collate_fn`` made it.
        num_samples: samples in it that count; 0 for a stand-in of weight 0.
    """

    batch: Any
    num_samples: int


class Step:
    """One global step of this rank: iterate over it for the micro-batches.

    Gradients are synchronised once, in the backward of the last micro-batch.

    Usage:
        for step in loader.steps():
            for x, y in step:
                loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    Attributes:
        num_samples: this rank's samples of the step.
        global_num_samples: the step's samples over all ranks.
        num_micro_batches: how many forwards it takes here; ranks may differ. At least 1.
    """

    def __init__(
        self,
        parts: Sequence[MicroBatch],
        global_num_samples: int,
        *,
        listener: StepListener,
        no_sync: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._parts = parts
        self._listener = listener
        self._no_sync = no_sync
        self.num_samples = sum(part.num_samples for part in parts)
        self.global_num_samples = global_num_samples
        self.num_micro_batches = len(parts)

    def __iter__(self) -> Iterator[Any]:
        *early, last = self._parts
        for part in early:
            self._listener.begin_forward(num_samples=part.num_samples, is_last=False)
            with self._no_sync():
                yield part.batch
        self._listener.begin_forward(num_samples=last.num_samples, is_last=True)
        yield last.batch


def cut(num_samples: int, max_forward: int | None) -> tuple[int, ...]:
    """Return the sizes of as few micro-batches as ``max_forward`` allows, equal within one."""
    if max_forward is None or num_samples <= max_forward:
        return (num_samples,)
    num_parts = -(-num_samples // max_forward)
    small, larger = divmod(num_samples, num_parts)
    return (small + 1,) * larger + (small,) * (num_parts - larger)
