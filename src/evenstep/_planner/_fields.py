"""The lengths of samples by the name of a column, or of a field of each sample or of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import Any

import numpy as np

from .._types import IntArray
from ..exceptions import invalid

MOST_LENGTH = 1 << 24  # the squares of 16,384 such samples still add up in 64 bits


def field_of(dataset: Any, name: str) -> Any:
    """Return the numbers under ``name``, or how long the lists there are, by index.

    A column is read as such; of a ``Subset``, the rows that it has. A field that only samples have
    is read from all of them, one after the other.

    Args:
        dataset: read by index; with ``column_names``, by the name of a column too.
        name: of a column or, where samples are mappings, of one of their fields.

    Raises:
        ValueError: there is neither.
    """
    inner, indices = whole_of(dataset)
    names = getattr(inner, "column_names", None)
    if isinstance(names, list) and name in names:
        values = _lengths(inner[name])
        return values if indices is None else values[indices]
    first = None
    with suppress(KeyError, TypeError, IndexError):  # of columns alone, or without samples
        first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        there = names or (list(first) if isinstance(first, Mapping) else "no columns")
        raise invalid(
            "Balancer(cost=...)",
            "name a column of the data set, or a field of its samples",
            f"{name!r} for a {type(inner).__name__} with {there}",
            "Give an array with a length for each index, or, of a field that the collator makes, "
            "`Cost(from_batch=...)`.",
        )
    return _lengths(dataset[index][name] for index in range(len(dataset)))


def batch_lengths(of: Any, samples: Sequence[Any], collate: Callable[[Any], Any]) -> Any:
    """Return a batch of samples, and the length of each.

    Args:
        of: the name of a field of the samples or, where they have none, of the batch; there it is
            of lengths, of lists, or of masks with a 1 for each token. Or a function of both.
        samples: at least one.
        collate: makes a batch of them; it may change them.

    Raises:
        ValueError: there is no such field, or its values are no lengths.
    """
    lengths: Any = None
    if isinstance(of, str) and isinstance(samples[0], Mapping) and of in samples[0]:
        lengths = [_length(sample[of]) for sample in samples]
    batch = collate(samples)
    if lengths is None:
        lengths = _of_field(of, batch) if isinstance(of, str) else of(samples, batch)
    found = np.asarray(lengths)
    is_whole = found.dtype.kind in "iu" and found.shape == (len(samples),)
    if not is_whole or found.min() < 0 or found.max() > MOST_LENGTH:
        limits = f" from {found.min()} to {found.max()}" if is_whole else ""
        raise invalid(
            "Cost(from_batch=...)",
            f"give an integer from 0 to {MOST_LENGTH} for each of the {len(samples)} samples of a "
            f"batch",
            f"{found.dtype} of shape {found.shape}{limits}",
            "Count the tokens of each sample, or in thousands what there is more of.",
        )
    return batch, found.astype(np.int64)


def sample_length(of: Any, sample: Any) -> int:
    """Return the length of one sample of a stream.

    Args:
        of: the name of a field, of a length or a list; or a function of the sample.
        sample: as the stream yields it.

    Raises:
        ValueError: there is no such field, or it is no length.
    """
    if not callable(of) and not (isinstance(sample, Mapping) and of in sample):
        raise invalid(
            "Balancer(cost=...)",
            "name a field of each sample of a stream",
            f"{of!r} for a {type(sample).__name__}"
            + (f" with {sorted(map(str, sample))}" if isinstance(sample, Mapping) else ""),
            "Have the stream yield mappings with that field, or give a function of a sample.",
        )
    found = of(sample) if callable(of) else _length(sample[of])
    with suppress(TypeError):
        if 0 <= index(found) <= MOST_LENGTH:
            return index(found)
    raise invalid(
        "Balancer(cost=...)",
        f"give an integer from 0 to {MOST_LENGTH} for each sample of a stream",
        repr(found)[:80],
        "Count tokens, pixels or nodes, in thousands where they are many.",
    )


def _of_field(name: str, batch: Any) -> Any:
    if not isinstance(batch, Mapping) or name not in batch:
        raise invalid(
            "Cost(from_batch=...)",
            "name a field of the samples, or of their batch",
            f"{name!r} for a batch with {list(batch) if isinstance(batch, Mapping) else 'none'}",
            "Give a function of the samples and their batch.",
        )
    values = batch[name]
    if getattr(values, "ndim", 1) != 2:
        return _lengths(values)
    rows = np.asarray(values)
    if rows.dtype.kind not in "iub" or rows.min() < 0 or rows.max() > 1:
        raise invalid(
            "Cost(from_batch=...)",
            "name lengths, lists, or a mask with a 1 for each token",
            f"{name!r}, whose rows are filled up",
            'Name the mask, such as "attention_mask", or give a function.',
        )
    return rows.sum(axis=1)


def whole_of(dataset: Any) -> tuple[Any, IntArray | None]:
    """Return what a ``Subset`` is of, and its rows; None are all of them."""
    indices: IntArray | None = None
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        own = np.asarray(dataset.indices, np.int64)
        indices = own if indices is None else own[indices]
        dataset = dataset.dataset
    return dataset, indices


def _lengths(values: Any) -> Any:
    """Return numbers as they are, of lists how long they are."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values
    return np.array([_length(value) for value in values])


def _length(value: Any) -> Any:
    # Of a list without a look at its items, which `np.ndim` would copy.
    return value if not isinstance(value, list | tuple) and np.ndim(value) == 0 else len(value)
