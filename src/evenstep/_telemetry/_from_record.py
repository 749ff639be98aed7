"""From a record of a file back to its event: whatever cannot be one is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from .. import events
from ..events import Event, RunStarted, StepMeasured, StepsAccounted, WaitingDiagnosed

_MOST = 2.0**53  # integers up to there are exact as floats; no time, size or rate is larger
_NUMBERS = frozenset({int, float})
_OF_STEPS = StepMeasured, StepsAccounted
_FACES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}

Read = Callable[[Any], Any]
"""Returns a field's value from what JSON has; raises ValueError with a rule that it breaks."""

_BY_CAUSE = ("causes", "ranks", "lost_share", "evidence", "remedy")
"""Tuples of ``WaitingDiagnosed``, with an entry for each cause instead of each rank."""

_NOT_BY_RANK = ("ranks", "versions")
"""Of ``LossNotFinite`` and ``RunStarted``."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How to read one kind of event: its fields in order, and what is known of their lengths."""

    kind: type[Event]
    reads: tuple[tuple[str, Read, Any], ...]
    per_rank: tuple[str, ...]


def from_record(record: Mapping[str, Any]) -> Event | None:
    """Return the event that ``events.to_record`` made the record of; None for an unknown name.

    Fields that this version does not know are passed over, as a newer one may have added them.
    Those that it has a default for may be missing. Numbers are finite, below 2^53 in size, and
    those with an entry for each rank are at least 0.

    Args:
        record: such as a line of JSON holds, with the event's name under ``"event"``.

    Raises:
        ValueError: a field is missing or cannot be what it says.
    """
    name = record.get("event")
    form = _forms().get(name) if isinstance(name, str) else None
    if form is None:
        return None
    found = {}
    for field, read, default in form.reads:
        value = record.get(field, MISSING)
        if value is MISSING:
            if default is MISSING:
                raise ValueError(f"`{name}({field}=...)` is missing")
            found[field] = default
            continue
        try:
            found[field] = read(value)
        except ValueError as error:
            raise ValueError(f"`{name}({field}=...)` must {error}, got {_short(value)}") from None
    if form.kind is WaitingDiagnosed and len({len(found[field]) for field in _BY_CAUSE}) > 1:
        raise ValueError("`WaitingDiagnosed` must have as many entries for each cause")
    if form.kind in _OF_STEPS and found.get("num_steps", 1) < 1:
        raise ValueError(f"`{name}(num_steps=...)` must be at least 1, got {found['num_steps']}")
    return form.kind(**found)


def check_ranks(event: Event, world_size: int) -> None:
    """Raise ValueError unless ``event`` can be one of so many ranks, at least one."""
    if world_size < 1:
        raise ValueError(f"`{type(event).__name__}` must speak of a rank at least, got none")
    form = _forms()[type(event).__name__]
    for field in form.per_rank:
        values = getattr(event, field)
        if values is not None and len(values) != world_size:
            name = f"`{form.kind.__name__}({field}=...)`"
            raise ValueError(f"{name} must speak of {world_size} ranks, got {len(values)}")
    named = getattr(event, "ranks", ())
    if (rank := getattr(event, "rank", None)) is not None:
        named = (rank,)
    least = -1 if isinstance(event, WaitingDiagnosed) else 0
    if any(not least <= each < world_size for each in named):
        name = f"`{form.kind.__name__}(rank=...)`"
        raise ValueError(f"{name} must name ranks below {world_size}, got {_short(named)}")


def world_size_of(event: Event) -> int | None:
    """Return the number of ranks that ``event`` speaks of; None where it does not tell."""
    if isinstance(event, RunStarted):
        return event.world_size
    known = [getattr(event, field) for field in _forms()[type(event).__name__].per_rank]
    return next((len(values) for values in known if values is not None), None)


@cache
def _forms() -> dict[str, _Form]:
    return {kind.__name__: _form(kind) for kind in get_args(events.Event)}


def _form(kind: type[Event]) -> _Form:
    hints = get_type_hints(kind)
    of_its_own = _BY_CAUSE if kind is WaitingDiagnosed else _NOT_BY_RANK
    per_rank = tuple(
        field.name
        for field in fields(kind)
        if _is_tuple(hints[field.name]) and field.name not in of_its_own
    )
    reads = tuple(
        (field.name, _reader(hints[field.name], counts=field.name in per_rank), field.default)
        for field in fields(kind)
    )
    return _Form(kind, reads, per_rank)


def _is_tuple(hint: Any) -> bool:
    return get_origin(hint) is tuple or any(get_origin(each) is tuple for each in get_args(hint))


def _reader(hint: Any, *, counts: bool) -> Read:
    """Return how to read a field of some type.

    Args:
        hint: its annotation.
        counts: whether numbers in a tuple are to be at least 0.
    """
    if isinstance(hint, UnionType):  # `X | None`, the only one there is
        (inner,) = (each for each in get_args(hint) if each is not NoneType)
        read = _reader(inner, counts=counts)
        return lambda value: None if value is None else read(value)
    if get_origin(hint) is tuple:
        of = get_args(hint)[0]
        kinds = _NUMBERS if of is float else frozenset({of})
        return lambda value: _tuple(value, of, kinds, least=0.0 if counts else -_MOST)
    kinds = _NUMBERS if hint is float else frozenset({hint})
    return lambda value: _one(value, hint, kinds)


def _one(value: Any, of: type, kinds: frozenset[type]) -> Any:
    if type(value) not in kinds:
        raise ValueError(f"be {_FACES[of]}")
    if of is str:
        _check_text(value)
    elif not -_MOST < value < _MOST:  # nor is NaN
        raise ValueError("be a number below 2^53")
    return of(value)


def _tuple(values: Any, of: type, kinds: frozenset[type], *, least: float) -> tuple[Any, ...]:
    # Whole lists at once: a file has hundreds of megabytes of them.
    types = set(map(type, values)) if type(values) is list else {None}
    if not types <= kinds:
        raise ValueError(f"be a list, each {_FACES[of]}")
    if of is str:
        for text in values:
            _check_text(text)
    elif values and not (least <= min(values) and sum(values) < _MOST):  # nor is NaN
        raise ValueError(f"hold numbers of at least {least:.0f}, together below 2^53")
    return tuple(values) if types <= {of} else tuple(map(of, values))


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character, which JSON can write and no terminal can show
        raise ValueError("be text in Unicode") from None


def _short(value: Any) -> str:
    text = ascii(value) if not isinstance(value, list) else f"a list of {len(value)}"
    return text if len(text) <= 60 else f"{text[:57]}..."
