"""Chunks of samples: packed for the way from a worker, and put together to batches."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

_ALIGNMENT = 64
# Larger buffers travel in shared memory. That takes a file descriptor and a handshake with the
# worker, half a millisecond together, in which a pipe moves about this much.
_LARGEST_INLINE = 1 << 19


@dataclass(frozen=True, slots=True)
class Packed:
    """One object, ready for a pipe between processes.

    Attributes:
        structure: everything but the contents of tensors and arrays, pickled.
        buffers: those contents: one buffer with all, or several; tensors of bytes are in shared
            memory where they were packed.
        places: for each content, the buffer it is in, where it begins and where it ends.
    """

    structure: bytes
    buffers: tuple[bytearray | Tensor, ...]
    places: tuple[tuple[int, int, int], ...]

    @property
    def num_shared(self) -> int:
        """Buffers in shared memory; each holds a file descriptor."""
        return sum(isinstance(buffer, Tensor) for buffer in self.buffers)

    def local(self) -> Packed:
        """Return it in memory of this process alone."""
        return Packed(self.structure, tuple(map(_copy, self.buffers)), self.places)

    def unpack(self, *, copy: bool) -> Any:
        """Return the object, in memory of its own with ``copy``.

        If not, it shares the buffers with every other object unpacked so: for readers only.
        """
        memory = [_view(_copy(buffer) if copy else buffer) for buffer in self.buffers]
        contents = [memory[k][first:last] for k, first, last in self.places]
        return pickle.loads(self.structure, buffers=contents)


def pack(value: Any) -> Packed:
    """Return ``value`` packed, or raise as `pickle` does; it may hold tensors and arrays."""
    contents: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = _Pickler(file, contents)
    pickler.dump(value)

    common, places, buffers, size = [], [], [], 0
    for content in contents:
        view = content.raw()
        shared = pickler.shared.get(id(content))
        if shared is not None:
            buffers.append(shared)
            places.append((len(buffers), 0, view.nbytes))
        else:
            common.append((size, view))
            places.append((0, size, size + view.nbytes))
            size = -(-(size + view.nbytes) // _ALIGNMENT) * _ALIGNMENT
    return Packed(file.getvalue(), (_gather(common, size), *buffers), tuple(places))


class _Pickler(pickle.Pickler):
    """Pickles plain tensors as NumPy pickles arrays: by reference to their contents.

    Attributes:
        shared: contents that lie in shared memory already, by the identity of their reference.
    """

    def __init__(self, file: io.BytesIO, contents: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=contents.append)
        self.shared: dict[int, Tensor] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return NotImplemented  # its own way, in the structure
        contents = obj.contiguous().view(-1).view(torch.uint8)
        memory: Any = contents.numpy()
        reference = pickle.PickleBuffer(memory)
        if contents.numel() > _LARGEST_INLINE and contents.is_shared():  # type: ignore[no-untyped-call]
            self.shared[id(reference)] = contents
        return _rebuild, (reference, obj.dtype, tuple(obj.shape))


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__  # attributes a user hung on it
    )


def _rebuild(contents: Any, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.frombuffer(contents, dtype=dtype).view(shape)


def _gather(contents: Sequence[tuple[int, memoryview]], size: int) -> bytearray | Tensor:
    """Return a buffer of ``size`` with each of the contents where it says."""
    buffer: bytearray | Tensor = bytearray(size)
    if size > _LARGEST_INLINE:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
    target = buffer.numpy() if isinstance(buffer, Tensor) else np.frombuffer(buffer, np.uint8)
    for first, view in contents:
        target[first : first + view.nbytes] = np.frombuffer(view, np.uint8)
    return buffer


def _copy(buffer: bytearray | Tensor) -> bytearray | Tensor:
    return buffer.clone() if isinstance(buffer, Tensor) else bytearray(buffer)


def _view(buffer: bytearray | Tensor) -> memoryview:
    memory: Any = buffer.numpy() if isinstance(buffer, Tensor) else buffer
    return memoryview(memory)


Chunk = Packed | list[Any]
"""Samples that came together; a list of those that were read in this process."""

SamplePlace = tuple[Chunk, int]
"""Where a sample lies: its chunk, and its place in that."""


ChunkRows = tuple[Chunk, slice]
"""Samples that lie side by side in a chunk."""


def rows_of(places: Iterable[SamplePlace]) -> list[ChunkRows]:
    """Return where samples lie, in as few pieces as can be."""
    rows: list[ChunkRows] = []
    for chunk, place in places:
        if rows and rows[-1][0] is chunk and rows[-1][1].stop == place:
            rows[-1] = chunk, slice(rows[-1][1].start, place + 1)
        else:
            rows.append((chunk, slice(place, place + 1)))
    return rows


Collate = Callable[[list[Any]], Any]
"""What makes one object of samples."""


def chunk_merge(collate: Collate) -> Collate | None:
    """Return what workers apply to a chunk's samples already; None is to leave them.

    Torch's ``default_collate`` runs in the workers, chunk by chunk, and the batch is a matter of
    laying collated chunks side by side. Any other function is given the list of samples, as it
    expects, in the background of the training process: the samples of a batch are known no
    earlier than its plan.
    """
    return collate_chunk if collate is default_collate else None


def batch_of(collate: Collate, merge: Collate | None, rows: Sequence[ChunkRows]) -> Any:
    """Return one batch of the samples in ``rows``: all packed, or all lists.

    In memory of its own, but for samples in lists.

    Args:
        collate: the user's ``collate_fn``.
        merge: what workers applied to a chunk's samples.
        rows: where the samples lie.
    """
    joins = merge is not None and isinstance(rows[0][0], Packed)
    # A `collate_fn` may change its samples, and the batch may be made again: it gets copies.
    chunks = [
        chunk.unpack(copy=not joins) if isinstance(chunk, Packed) else chunk for chunk, _ in rows
    ]
    parts = [part for _, part in rows]
    if joins:
        return _join(chunks, parts)
    samples = [chunk[part] for chunk, part in zip(chunks, parts, strict=True)]
    return collate(list(chain.from_iterable(samples)))


def collate_chunk(samples: list[Any]) -> Any:
    """Return ``default_collate(samples)``, of which chunks can be laid side by side.

    With a type of the user's own they cannot, which is a TypeError.
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
