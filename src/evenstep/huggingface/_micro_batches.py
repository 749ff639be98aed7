"""What `Trainer` takes for one batch: none, one or several forwards, cut between samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..exceptions import invalid
from ..torch._data._step import Step


class Pieces(NamedTuple):
    """A batch that can be cut between samples, or between the sequences of one row.

    Attributes:
        num: of its pieces.
        are_samples: whether each is one sample. A collator of already packed samples, as TRL's,
            lays several sequences of each into the row.
        cut: returns a batch of some pieces, from the first to before the end.
    """

    num: int
    are_samples: bool
    cut: Callable[[int, int], Any]


def pieces_of(batch: Any, num_samples: int) -> Pieces | None:
    """Return a batch as pieces, two at least; None if it cannot be cut.

    Args:
        batch: as a collator made it: with a row for each sample, in its tensors and lists and in
            mappings of such; or of one row, ``(1, length)``, in which sequences lie one behind the
            other, and their positions begin anew.
        num_samples: in it.
    """
    if not isinstance(batch, Mapping):
        return None
    parts = [part for part in _parts(batch) if not _is_for_all(part)]
    if num_samples > 1 and parts and all(_has_rows(part, num_samples) for part in parts):
        return Pieces(num_samples, True, partial(_rows, batch))
    positions = batch.get("position_ids")
    if not (isinstance(positions, torch.Tensor) and positions.ndim == 2 and len(positions) == 1):
        return None
    (row,) = positions
    begins = (row[1:] != row[:-1] + 1).nonzero().flatten() + 1
    ends = [0, *begins.tolist(), len(row)]
    num = len(ends) - 1
    return Pieces(num, num == num_samples, partial(_sequences, batch, ends)) if num > 1 else None


def _rows(value: Any, first: int, end: int) -> Any:
    if isinstance(value, Mapping):  # made anew as `Trainer` does to move it
        cut = {name: _rows(each, first, end) for name, each in value.items()}
        return type(value)(cut)  # type: ignore[call-arg]
    return value if _is_for_all(value) else value[first:end]


def _sequences(batch: Any, ends: Sequence[int], first: int, end: int) -> dict[str, Any]:
    """Return a batch of some sequences; ``ends`` are where they begin, and where the row ends."""
    begin, stop, length = ends[first], ends[end], ends[-1]

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape[:2] == (1, length):
            return value[:, begin:stop]
        if value.ndim == 1 and len(value) > 1 and value[0] == 0 and value[-1] == length:
            return value[(value >= begin) & (value <= stop)] - begin  # where sequences end
        return value

    found = {name: part(value) for name, value in batch.items()}
    if "seq_idx" in found:  # numbers of the sequences
        found["seq_idx"] = found["seq_idx"] - found["seq_idx"][0, 0]
    return found


def _parts(value: Any) -> Iterator[Any]:
    """Yield what a batch holds, in mappings within it too."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _parts(each)
    else:
        yield value


def _is_for_all(part: Any) -> bool:
    """Return whether a part is a single value, which stays as it is in every piece."""
    return part is None or isinstance(part, str | int | float) or getattr(part, "shape", None) == ()


def _has_rows(part: Any, num_samples: int) -> bool:
    """Return whether a part is an array or a list with a row for each sample."""
    is_some = isinstance(part, list | tuple) or hasattr(part, "shape")
    return is_some and len(part) == num_samples


IGNORED = -100  # what every Hugging Face loss leaves out, and `num_items_in_batch` as well
_MASK = "attention_mask"
_LABELS = ("labels", "shift_labels")

BELOW = (
    "Have methods of your own in a class that the mixin comes before: "
    "`class BalancedTrainer(BalancedMixin, OwnTrainer)`."
)
"""What to do where a method stands in the way of the mixin's."""


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward and its backward.

    Attributes:
        batch: as the collator made it.
        num_samples: samples in it that count; 0 for a stand-in.
        weight: of its loss in that of the step; 0 where nothing in it counts.
        is_last: whether gradients are averaged in its backward.
        is_extra: whether it is made only because other ranks have more, and has no backward.
    """

    batch: Any
    num_samples: int
    weight: Any
    is_last: bool
    is_extra: bool = False


class Portion(Mapping[str, torch.Tensor]):
    """Some forwards of one step, in the place of a batch.

    `Trainer` counts batches: it makes an optimizer step after so many of them, the same on all
    ranks. Here a step is cut into as many portions, and each rank's forwards are spread over
    them: a slow rank has fewer forwards than there are portions, a fast one may have more. The
    last portion has at least one, since gradients are averaged in it.

    As a mapping it holds what `Trainer` counts tokens by, once the forwards were made: the main
    input, flat, and the mask.

    Args:
        forwards: the portion's own.
        shared: the iterator over the step, which announces each forward as it begins.
        seen: mapping as above.
    """

    def __init__(
        self,
        forwards: Sequence[Forward],
        shared: Iterator[Any],
        seen: dict[str, torch.Tensor],
    ) -> None:
        self._forwards = forwards
        self._shared = shared
        self._seen = seen
        self._is_made = False

    def forwards(self) -> Iterator[Forward]:
        """Begin the forwards, one after the other."""
        for forward in self._forwards:
            if not forward.is_extra:
                next(self._shared)
            yield forward
        self._is_made = True

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return what `Trainer` counts by.

        Raises:
            ValueError: before the forwards: it is no batch to train on.
        """
        return self._counted()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counted())

    def __len__(self) -> int:
        """Return of how many kinds that is."""
        return len(self._counted())

    def _counted(self) -> dict[str, torch.Tensor]:
        if not self._is_made:
            raise invalid(
                "Trainer.training_step(inputs)",
                "hand `inputs` on to `super()` as they are, where it comes before `BalancedMixin`: "
                "they stand for several forwards there",
                "one that reads them",
                BELOW,
            )
        return self._seen


def portions(
    step: Step,
    batches: Sequence[Any],
    num_portions: int,
    *,
    main_input: str,
    weights: Sequence[Any] | None = None,
    num_extra: int = 0,
) -> list[Portion]:
    """Return the step's forwards in ``num_portions`` portions, at least 1.

    Args:
        step: of which they are.
        batches: of its forwards.
        num_portions: as many as on all ranks.
        main_input: name of the field by which `Trainer` counts tokens.
        weights: of the forwards.
        num_extra: how many more forwards other ranks have. All ranks meet in the last one's
            backward, so those to fill up with come before it.
    """
    counts = [part.num_samples for part in step.micro_batches]
    given = [int(count > 0) for count in counts] if weights is None else weights
    last = [False] * (len(counts) - 1) + [True]
    forwards = [Forward(*each) for each in zip(batches, counts, given, last, strict=True)]
    if num_extra:
        forwards[-1:-1] = [Forward(_of_nothing(step), 0, 0, False, is_extra=True)] * num_extra
    ends = [len(forwards) * number // num_portions for number in range(num_portions + 1)]
    shared = iter(step)
    names = [name for name in (main_input, _MASK) if name in batches[0]]
    return [
        Portion(
            forwards[begin:end],
            shared,
            {name: _flat(forwards[begin:end], name, batches[0][name]) for name in names},
        )
        for begin, end in pairwise(ends)
    ]


def masked(part: Any) -> Any:
    """Return a micro-batch's batch; of a stand-in a copy whose classes are all left out."""
    if part.num_samples or not isinstance(part.batch, MutableMapping):
        return part.batch
    return _without_targets(part.batch)


def with_own_targets(part: Any) -> Any:
    """Return a micro-batch's batch to count targets in: a stand-in's have no row, of any type."""
    if part.num_samples or not isinstance(part.batch, MutableMapping):
        return part.batch
    batch = copy(part.batch)
    for name in _LABELS:
        if isinstance(batch.get(name), torch.Tensor):
            batch[name] = batch[name][:0]
    return batch


def _of_nothing(step: Step) -> Any:
    """Return a batch without targets: the first piece, where the batch can be cut."""
    first = step.micro_batches[0]
    pieces = pieces_of(first.batch, first.num_samples)
    return _without_targets(first.batch if pieces is None else pieces.cut(0, 1))


def _without_targets(given: Any) -> Any:
    batch = copy(given)
    for name in _LABELS:
        labels = batch.get(name)
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            batch[name] = torch.full_like(labels, IGNORED)
    return batch


def _flat(forwards: Sequence[Forward], name: str, like: torch.Tensor) -> torch.Tensor:
    """Return all elements under ``name`` in one row; of pictures and sounds their number alone."""
    tensors = [forward.batch[name] for forward in forwards if forward.num_samples]
    if like.is_floating_point():
        return torch.empty(sum(tensor.numel() for tensor in tensors), device="meta")
    return torch.cat([like.new_empty(0), *(tensor.flatten() for tensor in tensors)])
