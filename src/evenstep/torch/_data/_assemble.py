"""Put a batch together from the chunks that its samples came in."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from ._pack import Packed


@dataclass(frozen=True, slots=True)
class Run:
    """Samples of a batch that lie side by side in a chunk.

    Attributes:
        chunk: the chunk.
        first: the first one's place in it.
        last: the place after the last one.
    """

    chunk: Packed
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Assembly:
    """How samples become batches, here and already in the workers.

    Torch's ``default_collate`` runs in the workers, chunk by chunk, and the batch is a matter of
    laying collated chunks side by side. Any other function is given the list of samples, as it
    expects, in the background of the training process: the samples of a batch are known no
    earlier than its plan.

    Attributes:
        collate: the user's ``collate_fn``.
        merge: what workers apply to a chunk's samples; None is to leave them.
    """

    collate: Callable[[list[Any]], Any]
    merge: Callable[[list[Any]], Any] | None

    @classmethod
    def of(cls, collate: Callable[[list[Any]], Any]) -> Assembly:
        """Return the fastest way that honours ``collate``."""
        return cls(collate, collate_chunk if collate is default_collate else None)

    def batch(self, runs: Sequence[Run]) -> Any:
        """Return one batch of the samples in ``runs``, in memory of its own."""
        if self.merge is not None:
            chunks = [run.chunk.unpack(copy=False) for run in runs]
            return _join(chunks, [slice(run.first, run.last) for run in runs])
        # Copies, as a `collate_fn` may change its samples, and the batch may be made again.
        parts = [run.chunk.unpack(copy=True)[run.first : run.last] for run in runs]
        return self.collate(list(chain.from_iterable(parts)))


def collate_chunk(samples: list[Any]) -> Any:
    """Return ``default_collate(samples)``, of which chunks can be laid side by side.

    Raises:
        TypeError: they cannot, as a type of the user's own is involved.
    """
    collated = default_collate(samples)
    _join([collated], [slice(0, 1)])
    return collated


def _join(chunks: Sequence[Any], rows: Sequence[slice]) -> Any:
    """Return what ``default_collate`` makes of the samples at ``rows`` of collated chunks."""
    first = chunks[0]
    if isinstance(first, Tensor):
        return torch.cat([chunk[part] for chunk, part in zip(chunks, rows, strict=True)])
    if isinstance(first, Mapping):
        fields = {key: _join([chunk[key] for chunk in chunks], rows) for key in first}
        if isinstance(first, MutableMapping):
            joined = copy.copy(first)
            joined.update(fields)
            return joined
        return type(first)(fields)  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        if first and isinstance(first[0], (str, bytes)):  # text is left as it is, one a sample
            texts = [chunk[part] for chunk, part in zip(chunks, rows, strict=True)]
            return type(first)(chain.from_iterable(texts))
        items = [_join(field, rows) for field in zip(*chunks, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    raise TypeError(
        f"`default_collate` made a {type(first).__name__} of samples, which cannot be laid side "
        "by side with others. Pass `DataLoader(collate_fn=...)` with a function of your own that "
        "calls `default_collate`."
    )


def pinner_of(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    """Return what ``loader.pin_memory`` asks for, and say if nothing can come of it."""
    if loader.pin_memory and not torch.accelerator.is_available():
        warnings.warn(
            "`DataLoader(pin_memory=True)` has no effect: there is no accelerator.", stacklevel=4
        )
    return pinner(wanted=loader.pin_memory)


def pinner(*, wanted: bool) -> Callable[[Any], Any]:
    """Return what moves a batch into pinned memory; without an accelerator, nothing does.

    For the thread that calls this: it takes over that thread's device.
    """
    if not wanted or not torch.accelerator.is_available():
        return lambda batch: batch
    # Private by its path, and the one function that knows how to pin whatever a batch may be.
    from torch.utils.data._utils.pin_memory import pin_memory

    device = torch.accelerator.current_accelerator()
    index = torch.accelerator.current_device_index()

    def pin(batch: Any) -> Any:
        torch.accelerator.set_device_index(index)
        return pin_memory(batch, None if device is None else device.type)  # type: ignore[no-untyped-call]

    return pin
