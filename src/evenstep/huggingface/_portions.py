"""What `Trainer` takes for one batch: none, one or several of this rank's forwards."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..torch._data._step import Step

_IGNORED = -100  # what every Hugging Face loss leaves out, and `num_items_in_batch` as well
_MASK = "attention_mask"


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward and its backward.

    Attributes:
        batch: as the collator made it.
        num_samples: samples in it that count; 0 for a stand-in.
        is_last: whether gradients are averaged in its backward.
    """

    batch: Any
    num_samples: int
    is_last: bool


class Portion(dict[str, torch.Tensor]):
    """Some forwards of one step, in the place of a batch.

    `Trainer` counts batches: it makes an optimizer step after so many of them, the same on all
    ranks. Here a step is cut into as many portions, and each rank's forwards are spread over
    them: a slow rank has fewer forwards than there are portions, a fast one may have more. The
    last portion has at least one, since gradients are averaged in it.

    As a mapping it holds what `Trainer` counts tokens by: the main input, flat, and the mask.

    Args:
        forwards: the portion's own.
        shared: the iterator over the step, which announces each forward as it begins.
        seen: mapping as above.
        global_num_samples: samples of the step over all ranks.
    """

    def __init__(
        self,
        forwards: Sequence[Forward],
        shared: Iterator[Any],
        seen: dict[str, torch.Tensor],
        global_num_samples: int,
    ) -> None:
        super().__init__(seen)
        self._forwards = forwards
        self._shared = shared
        self.global_num_samples = global_num_samples

    def forwards(self) -> Iterator[Forward]:
        """Begin the forwards, one after the other."""
        for forward in self._forwards:
            next(self._shared)
            yield forward


def portions(
    step: Step, batches: Sequence[Any], num_portions: int, *, main_input: str
) -> list[Portion]:
    """Return the step's forwards in ``num_portions`` portions, at least 1.

    Args:
        step: of a loop over ``loader.steps()``.
        batches: of its micro-batches, as they are to be trained on.
        num_portions: as many as Trainer counts batches.
        main_input: what the model calls its input, such as ``input_ids``.
    """
    counts = [part.num_samples for part in step.micro_batches]
    last = len(counts) - 1
    forwards = [
        Forward(batch, count, i == last)
        for i, (batch, count) in enumerate(zip(batches, counts, strict=True))
    ]
    ends = [len(counts) * number // num_portions for number in range(num_portions + 1)]
    shared = iter(step)
    names = [name for name in (main_input, _MASK) if name in batches[0]]
    return [
        Portion(
            forwards[begin:end],
            shared,
            {name: _flat(forwards[begin:end], name, batches[0][name]) for name in names},
            step.global_num_samples,
        )
        for begin, end in pairwise(ends)
    ]


def masked(part: Any) -> Any:
    """Return a micro-batch's batch; of a stand-in a copy without targets, for no count to see."""
    if part.num_samples or not isinstance(part.batch, MutableMapping):
        return part.batch
    batch = copy(part.batch)
    for name in ("labels", "shift_labels"):
        labels = batch.get(name)
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            batch[name] = torch.full_like(labels, _IGNORED)
    return batch


def _flat(forwards: Sequence[Forward], name: str, like: torch.Tensor) -> torch.Tensor:
    """Return all elements under ``name`` in one row; of pictures and sounds their number alone."""
    tensors = [forward.batch[name] for forward in forwards if forward.num_samples]
    if like.is_floating_point():
        return torch.empty(sum(tensor.numel() for tensor in tensors), device="meta")
    return torch.cat([like.new_empty(0), *(tensor.flatten() for tensor in tensors)])
