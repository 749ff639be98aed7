"""The lengths of samples by the name of a column, or of a field that each sample has."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from .._types import IntArray
from ..exceptions import invalid


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
            "Give an array with a length for each index.",
        )
    return _lengths(dataset[index][name] for index in range(len(dataset)))


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
