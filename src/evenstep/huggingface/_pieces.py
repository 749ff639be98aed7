"""A batch cut between its samples: rows, or the sequences of one packed row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch


@final
class RowPieces:
    """A batch with a row for each sample, in its tensors and lists and in mappings of such.

    Attributes:
        num: of its pieces.
        num_samples: in them; None where samples are no pieces.
    """

    def __init__(self, batch: Any, num_samples: int) -> None:
        self._batch = batch
        self.num = num_samples
        self.num_samples: int | None = num_samples

    def cut(self, first: int, end: int) -> Any:
        """Return a batch of some pieces, from ``first`` to before ``end``."""
        return self._cut(self._batch, first, end)

    def _cut(self, value: Any, first: int, end: int) -> Any:
        if isinstance(value, Mapping):  # made anew as `Trainer` does to move it
            cut = {name: self._cut(each, first, end) for name, each in value.items()}
            return type(value)(cut)  # type: ignore[call-arg]
        return value if _is_for_all(value) else value[first:end]


@final
class SequencePieces:
    """A batch of one row, ``(1, length)``, in which sequences lie one behind the other.

    Their positions begin anew. A collator of already packed samples, as TRL's, lays several
    sequences of each sample into the row.

    Attributes:
        num: of its sequences.
        num_samples: in them; None where a sample has several.
    """

    def __init__(self, batch: Any, num_samples: int) -> None:
        positions = batch["position_ids"][0]
        begins = (positions[1:] != positions[:-1] + 1).nonzero().flatten() + 1
        self._batch = batch
        self._length = len(positions)
        self._ends = [0, *begins.tolist(), self._length]
        self.num = len(self._ends) - 1
        self.num_samples = num_samples if num_samples == self.num else None

    def cut(self, first: int, end: int) -> dict[str, Any]:
        """Return a batch of some sequences, from ``first`` to before ``end``."""
        begin, stop = self._ends[first], self._ends[end]
        found = {name: self._of(value, begin, stop) for name, value in self._batch.items()}
        if "seq_idx" in found:  # numbers of the sequences
            found["seq_idx"] = found["seq_idx"] - found["seq_idx"][0, 0]
        return found

    def _of(self, value: Any, begin: int, stop: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape[:2] == (1, self._length):
            return value[:, begin:stop]
        if value.ndim == 1 and len(value) > 1 and value[0] == 0 and value[-1] == self._length:
            return value[(value >= begin) & (value <= stop)] - begin  # where sequences end
        return value


def pieces_of(batch: Any, num_samples: int) -> RowPieces | SequencePieces | None:
    """Return a batch as pieces, two at least; None if it cannot be cut.

    Args:
        batch: as a collator made it.
        num_samples: in it.
    """
    if not isinstance(batch, Mapping):
        return None
    parts = [part for part in _parts(batch) if not _is_for_all(part)]
    if num_samples > 1 and parts and all(_has_rows(part, num_samples) for part in parts):
        return RowPieces(batch, num_samples)
    positions = batch.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.ndim == 2 and len(positions) == 1:
        packed = SequencePieces(batch, num_samples)
        return packed if packed.num > 1 else None
    return None


def _parts(value: Any) -> Iterator[Any]:
    """Yield what a batch holds, in mappings within it too."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _parts(each)
    else:
        yield value


def _is_for_all(part: Any) -> bool:
    """Tell whether a part is a single value, which stays as it is in every piece."""
    return part is None or isinstance(part, str | int | float) or getattr(part, "shape", None) == ()


def _has_rows(part: Any, num_samples: int) -> bool:
    """Tell whether a part is an array or a list with a row for each sample."""
    is_some = isinstance(part, list | tuple) or hasattr(part, "shape")
    return is_some and len(part) == num_samples
