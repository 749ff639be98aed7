"""Nested batches and outputs, rebuilt with their members changed and their types kept."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch


def tensors_in(item: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers and in the attributes of plain objects.

    At every hand-out and every forward, so without recursion. Of an object that is no container,
    such as a graph with its features, attributes are looked at; of objects in those, none are.
    """
    is_plain = type(item) in _PLAIN and set(map(type, item)) == _TENSORS
    return list(item) if is_plain else _found_in(item)  # plain, as nearly always


def _found_in(item: Any) -> list[torch.Tensor]:
    """Return the tensors in what may be nested."""
    found: list[torch.Tensor] = []
    queue: list[tuple[Any, bool]] = [(item, True)]
    seen: set[int] = set()  # objects may refer to each other
    while queue:
        item, opens = queue.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            queue += [(entry, opens) for entry in item]
        elif isinstance(item, (dict, Mapping)):
            queue += [(entry, opens) for entry in item.values()]
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            if id(item) not in seen:
                seen.add(id(item))
                fields = (getattr(item, f.name, None) for f in dataclasses.fields(item))
                queue.extend((entry, opens) for entry in fields)
        elif opens and hasattr(item, "__dict__") and not isinstance(item, _CLOSED):
            queue.extend((entry, False) for entry in vars(item).values())
    return found


_PLAIN, _TENSORS = {tuple, list}, {torch.Tensor}
_CLOSED = (type, torch.nn.Module, types.FunctionType, types.ModuleType)


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


def input_size(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return how many samples and how many numbers a forward was given; 0 where not known.

    Tokens count where there are some: integers with a dimension of their own. Else it is the
    largest tensor, such as the images. Samples are its leading dimension.
    """
    if len(tensors) == 1:  # as nearly always
        return (tensors[0].size(0), tensors[0].numel()) if tensors[0].dim() else (0, 0)
    best, best_size, best_is_tokens = None, 0, False
    for tensor in tensors:
        if not tensor.dim():
            continue
        is_tokens = tensor.dim() > 1 and not (tensor.is_floating_point() or tensor.is_complex())
        size = tensor.numel()
        if (is_tokens, size) > (best_is_tokens, best_size):
            best, best_size, best_is_tokens = tensor, size, is_tokens
    # A strided nested tensor has this size and no `shape`.
    return (0, 0) if best is None else (best.size(0), best_size)


def hidden_tensors_in(item: Any) -> list[torch.Tensor]:
    """Return the tensors in an object's attributes, in objects in those, or in a queue or a set.

    Of a cache of transformers', which every model returns and no loss reads, the attributes alone.
    """
    if isinstance(item, deque | set | frozenset):
        return tensors_in(list(item))
    held = list(getattr(item, "__dict__", {}).values())
    if not held or isinstance(item, type | torch.nn.Module):
        return []
    if type(item).__module__.startswith("transformers."):
        return [entry for entry in held if isinstance(entry, torch.Tensor)]
    inner = [entry for entry in held if isinstance(entry, torch.distributions.Distribution)]
    return tensors_in(held) + [tensor for entry in inner for tensor in hidden_tensors_in(entry)]
