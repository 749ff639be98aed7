"""Nested batches and outputs, rebuilt with their members changed and their types kept."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any


def rebuild(
    item: Any, visit: Callable[[Any], Any], leaf: Callable[[Any], Any] = lambda item: item
) -> Any:
    """Return ``item`` with its members visited, in a container of the same type.

    Dicts and their kin, lists, tuples, named tuples and dataclasses, whose own fields and
    attributes are copied along; what is none of them goes through ``leaf``.
    """
    if isinstance(item, MutableMapping):
        made = copy.copy(item)
        for key in list(item):
            made[key] = visit(item[key])
        return made
    if isinstance(item, Mapping):
        return type(item)({key: visit(entry) for key, entry in item.items()})  # type: ignore[call-arg]
    if isinstance(item, tuple):
        members = [visit(entry) for entry in item]
        return type(item)(*members) if hasattr(item, "_fields") else type(item)(members)
    if isinstance(item, list):
        made_list = copy.copy(item)
        made_list[:] = [visit(entry) for entry in item]
        return made_list
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        made_value: Any = copy.copy(item)
        for field in dataclasses.fields(item):
            object.__setattr__(made_value, field.name, visit(getattr(item, field.name)))
        return made_value
    return leaf(item)
