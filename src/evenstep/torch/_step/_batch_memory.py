"""Whose memory a tensor is, and by which values a copy of it is recognised."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..._private_torch import address_of, version_of

T = TypeVar("T")

_KIND, _DENSE = attrgetter("layout", "is_meta", "is_nested"), {(torch.strided, False, False)}

_MOST_OWNERS = 8  # batches at one address: with more it is a constant, such as a mask
_MOST_RANGES = 64  # newest tensors in one storage of which parts are recognised
_MOST_PARTS = 4096  # tensors in one storage, as where all batches are slices of one
_NUM_VALUES = 32  # by which a copy is recognised
_MOST_LAYOUTS = 256  # shapes of handed-out tensors
_LOOK_EVERY = 8  # batches, for memory that was freed: a look at several is quicker than one at each


@dataclass(eq=False, slots=True)
class _Part(Generic[T]):
    """A handed-out tensor."""

    owner: T
    first: int
    end: int
    size: int
    rows: int
    stride: int
    version: int

    def share(self, tensor: torch.Tensor) -> float | None:
        """Return which part of the rows ``tensor`` has; None where that is unknown."""
        if tensor.numel() == self.size:
            return 1.0
        if not (tensor.ndim and self.stride) or tensor.stride(0) % self.stride:
            return None
        return tensor.shape[0] / self.rows if tensor.shape[0] <= self.rows else None


@dataclass(eq=False, slots=True)
class _Storage(Generic[T]):
    """Memory of which handed-out tensors are parts, mostly of one."""

    alive: StorageWeakRef  # which keeps the address from being given to other memory
    parts: list[_Part[T]]

    def parts_of(self, tensor: torch.Tensor) -> list[_Part[T]]:
        """Return what ``tensor`` may be: what begins where it does, or the newest it lies in."""
        first, size = tensor.data_ptr(), tensor.numel()
        if len(self.parts) == 1 and self.parts[0].first == first and self.parts[0].size == size:
            return self.parts
        at = [part for part in self.parts if part.first == first]
        same = [part for part in at if part.size == size]
        larger = [part for part in at if part.size > size]
        if same or larger:
            return same or larger[-1:]
        newest = self.parts[-_MOST_RANGES:]
        return [part for part in newest if part.first <= first < part.end][-1:]


class Found(NamedTuple, Generic[T]):
    """Whose memory the inputs of a forward are.

    Attributes:
        owners: those it may be, the newest last; none if the inputs are those of several.
        share: which part of the rows they have; None where that is unknown.
        is_changed: whether the memory was written to since it was handed out.
    """

    owners: tuple[T, ...]
    share: float | None
    is_changed: bool


class BatchMemory(Generic[T]):
    """Memory that was handed out, as long as it is alive, and who owns it."""

    def __init__(self) -> None:
        self._storages: OrderedDict[int, _Storage[T]] = OrderedDict()
        self._num_added = self._num_batches = 0  # since the last look

    def __len__(self) -> int:
        """Return how many storages are known."""
        return len(self._storages)

    def add(self, tensors: Sequence[torch.Tensor], owner: T) -> bool:
        """Note that ``tensors``, which have memory, are handed out.

        Return whether none of their memory was handed out before.
        """
        is_new = True
        self._num_batches += 1
        self._num_added += len(tensors)
        if self._num_batches == _LOOK_EVERY:
            self._forget_freed(self._num_added + _LOOK_EVERY)  # more than came
            self._num_batches = self._num_added = 0
        for tensor in tensors:
            memory = tensor.untyped_storage()
            address = address_of(memory)
            storage = self._storages.get(address)
            if storage is None:
                alive = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
                storage = self._storages[address] = _Storage(alive, [])
            first, size = tensor.data_ptr(), tensor.numel()
            rows = tensor.shape[0] if tensor.ndim else 1
            stride = tensor.stride(0) if tensor.ndim else 0
            end = first + size * tensor.element_size()
            version = version_of(tensor)
            storage.parts.append(_Part(owner, first, end, size, rows, stride, version))
            if len(storage.parts) > 1:
                is_new = False
                if len(storage.parts) > _MOST_PARTS:
                    del storage.parts[: _MOST_PARTS // 2]
        return is_new

    def find(self, tensors: Sequence[torch.Tensor]) -> Found[T] | None:
        """Return whose memory ``tensors``, which have some, are; None if they are unknown."""
        known = [(tensor, parts) for tensor in tensors if (parts := self._parts_of(tensor))]
        if not known:
            return None
        if len(known) == 1 and len(known[0][1]) == 1:  # as in most loops
            (tensor, (part,)), *_ = known
            return Found((part.owner,), part.share(tensor), version_of(tensor) != part.version)
        owners = [part.owner for part in known[0][1]]
        for _, parts in known[1:]:
            theirs = [part.owner for part in parts]
            owners = [owner for owner in owners if any(owner is other for other in theirs)]
        if not owners:
            return Found((), None, is_changed=False)
        tensor, parts = known[0]
        part = next(part for part in reversed(parts) if part.owner is owners[-1])
        return Found(tuple(owners), part.share(tensor), version_of(tensor) != part.version)

    def _parts_of(self, tensor: torch.Tensor) -> list[_Part[T]]:
        storage = self._storages.get(address_of(tensor.untyped_storage()))
        parts = [] if storage is None else storage.parts_of(tensor)
        return [] if len(parts) >= _MOST_OWNERS else parts

    def _forget_freed(self, count: int) -> None:
        """Look whether the storages that were not looked at for longest have been freed."""
        for _ in range(min(count, len(self._storages))):
            number, storage = self._storages.popitem(last=False)
            if not storage.alive.expired():  # type: ignore[no-untyped-call]
                self._storages[number] = storage


def has_memory(tensor: Any) -> bool:
    """Return whether ``tensor`` has rows in memory of its own: no sparse, nested or meta tensor."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    return bool(tensor.numel() > 0)


def with_memory(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of ``tensors`` that have rows in memory of their own."""
    if set(map(_KIND, tensors)) <= _DENSE and all(map(torch.Tensor.numel, tensors)):
        return list(tensors)  # as nearly always
    return [one for one in tensors if has_memory(one)]


@dataclass(frozen=True, slots=True)
class Peek:
    """Values of a tensor's first row, evenly spaced; of rows of one value, the first ones.

    Attributes:
        num_rows: of the tensor.
        row: the shape of a row.
        values: some of its values.
    """

    num_rows: int
    row: torch.Size
    values: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Peek | None:
        """Return what there is to see of ``tensor``; None of scalars and of what has no strides."""
        if not has_memory(tensor) or not tensor.ndim:
            return None
        with torch.no_grad():
            return cls(tensor.shape[0], tensor.shape[1:], _some(tensor))

    def shows(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` may begin with a copy: moved, or cast to another type.

        A tensor on a device is waited for. Only what leaves its batch open gets here.
        """
        if tensor.ndim != len(self.row) + 1 or tensor.shape[1:] != self.row:
            return False
        with torch.no_grad():
            theirs = _some(tensor)
            length = min(len(theirs), len(self.values))
            mine = self.values[:length].to(theirs.device, theirs.dtype)
            return torch.allclose(mine, theirs[:length], rtol=0.0, atol=0.0, equal_nan=True)


def _some(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 1:
        return tensor[:_NUM_VALUES].clone()
    row = tensor[0]
    size = row.numel()
    count = min(size, _NUM_VALUES)
    return row.take(torch.arange(count, device=row.device) * size // count)


class Layouts:
    """Where the rows of batches lie: along the first dimension, or along the second.

    Attributes:
        forms: of batches of which all is known that there is to know.
    """

    def __init__(self) -> None:
        self.forms: set[tuple[Any, ...]] = set()
        self._layouts: set[tuple[int, torch.Size]] = set()  # where rows lie, and the other sizes
        self._shapes: set[tuple[torch.Size, int]] = set()  # of which that is known

    def note(self, tensors: Sequence[torch.Tensor], size: int) -> None:
        """Remember along which dimension of a batch's tensors its rows lie."""
        if len(self.forms) > _MOST_LAYOUTS:
            self.forms.clear()
        for tensor in tensors:
            if (tensor.shape, size) in self._shapes:
                continue
            if len(self._shapes) > _MOST_LAYOUTS:  # of text of all lengths, say
                for known in (self._shapes, self._layouts, self.forms):
                    known.clear()
            self._shapes.add((tensor.shape, size))
            if size in tensor.shape[:2]:
                at = tensor.shape[:2].index(size)
                self._layouts.add((at, tensor.shape[:at] + tensor.shape[at + 1 :]))

    def rows_of(self, tensors: Sequence[torch.Tensor]) -> tuple[set[int], set[int]]:
        """Return how many rows inputs may have, and of which there may be several views each.

        Rows lie where they do in a tensor that was handed out and is otherwise of the same shape;
        where there is none, along the first dimension, or along the second if time comes first.
        """
        rows: set[int] = set()
        views: set[int] = set()
        for tensor in tensors:
            shape = tensor.shape
            known = [
                at
                for at in range(min(len(shape), 2))
                if (at, shape[:at] + shape[at + 1 :]) in self._layouts
            ]
            rows.update(shape[at] for at in known or range(min(len(shape), 2)))
            views.update(shape[at] for at in known or range(min(len(shape), 1)))
        return rows, views
