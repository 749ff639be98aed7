"""What of a batch has one entry per sample, by which it is cut; and trials that leave no trace."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ..._nested_tensors import rebuild
from ..._private_torch import buffers_of
from ...exceptions import invalid
from .._data.fetch._loader_workers import pinning
from .._data.loaders._stream import StreamLoader


@contextmanager
def kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put gradients, buffers and the random state back at the end; inside, there are no gradients.

    The random state is that of torch's default generators, numpy's and Python's own.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    grads = [parameter.grad for parameter in parameters]
    buffers = list(_buffers(modules))
    values = [buffer.clone() for _, _, buffer in buffers]
    try:
        with kept_random(parameters):
            for parameter in parameters:
                parameter.grad = None
            yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        with torch.no_grad():
            for (layer, name, buffer), value in zip(buffers, values, strict=True):
                buffers_of(layer)[name] = buffer  # a forward may have put another in its place
                buffer.copy_(value)


@contextmanager
def kept_random(parameters: Sequence[nn.Parameter] = ()) -> Iterator[None]:
    """Put the random state back at the end: torch's, on the parameters' devices too, and others'.

    Others are numpy's and Python's own.
    """
    devices = {p.device.index for p in parameters if p.device.type == "cuda"}
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


def _buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield every buffer with the layer that holds it and its name there."""
    for module in modules:
        for layer in module.modules():
            for name, buffer in buffers_of(layer).items():
                if buffer is not None:
                    yield layer, name, buffer


Path = tuple[Any, ...]
"""Keys, places and field names that lead to a member of a batch."""

_REMEDY = "Have `collate_fn` lay samples along the first dimension, or set `Bounds(max=...)`."


class Layout:
    """Cuts batches by their samples: it finds out which members have one entry per sample.

    Two batches that differ in size alone are compared: what has as many entries as samples in both
    has one for each. A length by itself says nothing: a batch of 64 may hold 64 class weights.

    Right for what collates samples along the first dimension: tensors, and lists of one entry per
    sample, in dicts, lists, tuples, named tuples and dataclasses.

    Args:
        collated: returns a batch of so many samples, as the loader's ``collate_fn`` makes them.
    """

    def __init__(self, collated: Callable[[int], Any]) -> None:
        few, more = (dict(_lengths(collated(size), ())) for size in (2, 3))
        self._known = {path: few[path] == 2 and more[path] == 3 for path in few.keys() & more}

    def split(self, batch: Any, num_samples: int, sizes: Sequence[int]) -> list[Any]:
        """Return ``batch`` in parts of ``sizes`` samples, one after the other.

        What has no entry per sample is passed to every part. Tensors are views: nothing is copied.

        Args:
            batch: a collated batch.
            num_samples: how many samples it holds.
            sizes: of the parts, positive, adding up to ``num_samples``.

        Raises:
            ValueError: nothing in the batch has one entry per sample, or that is unclear.
        """
        parts, first = [], 0
        for size in sizes:
            parts.append(self._selected(batch, num_samples, slice(first, first + size)))
            first += size
        return parts

    def repeat(self, batch: Any, num_samples: int, wanted: int) -> Any:
        """Return a batch of ``wanted`` samples: those of ``batch``, over and over.

        Raises:
            ValueError: as for ``split``.
        """
        rows = [row % num_samples for row in range(wanted)]
        return self._selected(batch, num_samples, rows)

    def per_sample(self, batch: Any, num_samples: int) -> list[Any]:
        """Return the outermost members of ``batch`` that have one entry per sample.

        Raises:
            ValueError: there is none, or one for which that is unclear.
        """
        found: list[Any] = []
        done: list[Path] = []
        for path, item in _members(batch, ()):
            if any(path[: len(outer)] == outer for outer in done):
                continue
            length = _length(item)
            known = self._known.get(path, None if length == num_samples else False)
            if known is None or (known and length != num_samples):
                raise _refused(num_samples, f"`{_named(path)}` with {length} entries")
            if known:
                found.append(item)
                done.append(path)
        if not found:
            raise _refused(num_samples, f"a {type(batch).__name__} without any")
        return found

    def _selected(self, batch: Any, num_samples: int, rows: slice | list[int]) -> Any:
        chosen = {id(item) for item in self.per_sample(batch, num_samples)}

        def visit(item: Any) -> Any:
            return _take(item, rows) if id(item) in chosen else rebuild(item, visit)

        return visit(batch)


def _take(item: Any, rows: slice | list[int]) -> Any:
    if isinstance(item, torch.Tensor) or isinstance(rows, slice):
        return item[rows]
    return type(item)([item[row] for row in rows])


def layout_by(loader: Any, prepared: Any) -> Callable[[], Layout]:
    """Return what finds out the layout of the loader's batches, from one sample over and over.

    Fetched as in training, in a worker process where there are any, and under random states that
    are put back.

    Args:
        loader: the user's own.
        prepared: what ``prepare`` made of it.
    """

    def find() -> Layout:
        with kept_random():
            if isinstance(prepared, StreamLoader):
                return Layout(prepared.repeated)
            return Layout(_repeating(loader))

    return find


def _repeating(loader: Any) -> Callable[[int], Any]:
    """Return what makes a batch of the data set's first sample, over and over.

    Fetched as in training: by a worker process, set up as the user's are, where there are any.
    The sampler is not asked, and no generator that training draws from is drawn from.
    """
    stock = DataLoader(
        loader.dataset,
        sampler=range(1),
        num_workers=min(loader.num_workers, 1),
        collate_fn=_as_they_are,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )
    ((sample,),) = stock
    batch_of = pinning(loader, loader.collate_fn, warns=False)
    # Each time a copy, as a `collate_fn` may change what it is given.
    return lambda size: batch_of([copy.deepcopy(sample) for _ in range(size)])


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def _members(item: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield ``item`` and all that it holds, outer ones first."""
    yield path, item
    pairs: Any = ()
    if isinstance(item, Mapping):
        pairs = item.items()
    elif isinstance(item, (list, tuple)):
        pairs = enumerate(item)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        pairs = [(field.name, getattr(item, field.name)) for field in dataclasses.fields(item)]
    for key, member in pairs:
        yield from _members(member, (*path, key))


def _lengths(item: Any, path: Path) -> Iterator[tuple[Path, int | None]]:
    for place, member in _members(item, path):
        yield place, _length(member)


def _length(item: Any) -> int | None:
    """Return the entries of what may have one per sample; None for all else."""
    if isinstance(item, torch.Tensor):
        return len(item) if item.dim() else None
    is_list = isinstance(item, (list, tuple)) and not hasattr(item, "_fields")
    return len(item) if is_list else None


def _named(path: Path) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _refused(num_samples: int, got: str) -> ValueError:
    rule = (
        f"get batches that can be cut: tensors or lists with one entry for each of the "
        f"{num_samples} samples"
    )
    return invalid("Step.backward(...)", rule, got, _REMEDY)
