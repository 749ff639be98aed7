"""Samples of one chunk in one buffer: a few bytes of structure, and all their numbers."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
        """Return the object.

        Args:
            copy: whether it gets its own memory. If not, it shares the buffers with every other
                object unpacked so: for readers only.
        """
        memory = [_view(_copy(buffer) if copy else buffer) for buffer in self.buffers]
        contents = [memory[k][first:last] for k, first, last in self.places]
        return pickle.loads(self.structure, buffers=contents)


def pack(value: Any) -> Packed:
    """Return ``value`` packed; tensors and arrays may be anywhere within.

    Raises:
        Exception: as `pickle` raises it, if ``value`` cannot be sent to another process.
    """
    contents: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=5, buffer_callback=contents.append)
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

    def __init__(
        self,
        file: io.BytesIO,
        *,
        protocol: int,
        buffer_callback: Callable[[pickle.PickleBuffer], None],
    ) -> None:
        super().__init__(file, protocol=protocol, buffer_callback=buffer_callback)
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
