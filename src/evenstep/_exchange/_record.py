"""Classes of named fields, read from lists of plain values by the types of their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

Reader = Callable[[Any], Any]

_LONGEST = 80  # characters of a value in an error
_LIST: set[type] = {list}


class MessageError(ValueError):
    """What came is no message that this version of evenstep knows."""


def record_reader(kind: Any) -> Reader:
    """Return what makes an object of its fields' values, as JSON holds them.

    Rank 0 reads some of each rank in every step: the types of all values are looked up at once.

    Args:
        kind: a dataclass or a named tuple whose fields are numbers, texts, switches, tuples and
            mappings to plain values, or further such classes; each may be None instead.

    Returns:
        What takes a list, which is its own from then on. It raises ``MessageError`` where a field
        is missing, too many, or of another type.
    """
    hints = [get_type_hints(kind)[name] for name in kind.__match_args__]
    every = [(at, _reader(hint)) for at, hint in enumerate(hints)]
    inner = [(at, reader) for at, reader in every if not _plain_kinds(hints[at])]
    known: set[tuple[type, ...]] = set()

    def record(values: Any) -> Any:
        types, at, unread = tuple(map(type, values)), 0, inner
        if types not in known or type(values) is not list:
            _check_number(kind, values)
            unread = every
        try:
            for at, reader in unread:
                values[at] = reader(values[at])
        except (TypeError, ValueError) as error:
            problem = error if isinstance(error, MessageError) else f"cannot be {short(values[at])}"
            name = f"`{kind.__name__}.{kind.__match_args__[at]}`"
            raise MessageError(f"{name}: {problem}") from None
        if unread is every:
            known.add(types)
        return kind(*values)

    return record


def _check_number(kind: Any, values: Any) -> None:
    if type(values) is not list or len(values) != len(kind.__match_args__):
        fields = ", ".join(kind.__match_args__) or "no fields"
        raise MessageError(f"`{kind.__name__}` must have {fields}, got {short(values)}")


def short(value: Any) -> str:
    """Return a value as an error shows it."""
    return cut(repr(value), _LONGEST)


def cut(text: str, longest: int) -> str:
    """Return a text of at most ``longest`` characters: the beginning of a longer one."""
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def _reader(hint: Any) -> Reader:
    """Return what reads a value of a type, and refuses one of another."""
    origin, arguments = get_origin(hint), get_args(hint)
    if kinds := _plain_kinds(hint):
        return partial(_of, kinds, hint)
    if origin in (UnionType, Union):
        (given,) = [_reader(one) for one in arguments if one is not NoneType]
        return lambda value: None if value is None else given(value)
    if origin is Mapping:
        return partial(_mapping, hint, arguments[0], _plain_kinds(arguments[1]))
    if origin is tuple and arguments[-1] is Ellipsis:
        if kinds := _plain_kinds(arguments[0]):
            return partial(_row, hint, kinds)
        each = _reader(arguments[0])
        return partial(_records, hint, each)
    if origin is tuple:
        readers = [_reader(one) for one in arguments]
        return lambda value: tuple(
            [read(one) for read, one in zip(readers, _of(_LIST, hint, value), strict=True)]
        )
    return record_reader(hint)


def _plain_kinds(hint: Any) -> set[type]:
    """Return the types of the values that a plain type stands for; none for all other types."""
    if hint is float:
        return {float, int}  # a whole number may have been written without a point
    if hint in (int, str, bool, NoneType):
        return {hint}
    if get_origin(hint) in (UnionType, Union):
        found = [_plain_kinds(one) for one in get_args(hint)]
        return set().union(*found) if all(found) else set()
    return set()


def _of(kinds: set[type], hint: Any, value: Any) -> Any:
    if type(value) not in kinds:
        raise MessageError(f"must be {getattr(hint, '__name__', hint)}, got {short(value)}")
    return value


def _records(hint: Any, each: Reader, values: Any) -> tuple[Any, ...]:
    if type(values) is not list:
        raise MessageError(f"must be {hint}, got {short(values)}")
    return tuple([each(value) for value in values])


def _row(hint: Any, kinds: set[type], values: Any) -> tuple[Any, ...]:
    """Return a tuple of plain values, of any length."""
    if type(values) is not list or not kinds.issuperset(map(type, values)):
        raise MessageError(f"must be {hint}, got {short(values)}")
    return tuple(values)


def _mapping(hint: Any, key: type, kinds: set[type], values: Any) -> dict[Any, Any]:
    """Return a mapping to plain values; its keys are texts in JSON."""
    if type(values) is not dict or not kinds.issuperset(map(type, values.values())):
        raise MessageError(f"must be {hint}, got {short(values)}")
    return values if key is str else {key(name): value for name, value in values.items()}
