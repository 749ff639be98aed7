"""A checkup as JSON, and back: what ``evenstep plan --doctor`` reads."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..exceptions import invalid
from ._checkup_facts import Checkup
from ._findings import FoundAilment

SCHEMA = "evenstep.doctor"
VERSION = 1

Value = TypeVar("Value")


def to_json(checkup: Checkup, findings: Sequence[FoundAilment]) -> str:
    """Return it as indented text; times in seconds, rates in bytes per second."""
    record = {"schema": SCHEMA, "version": VERSION, "checkup": asdict(checkup)}
    record["findings"] = [asdict(finding) for finding in findings]
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def read_checkup(path: str | Path) -> Checkup:
    """Return what ``evenstep doctor`` wrote.

    Raises:
        ValueError: the file is damaged, of something else, or of a newer version.
        OSError: it cannot be read.
    """
    name, remedy = f"read_checkup({str(path)!r})", "Give what `evenstep doctor --out` wrote."
    try:
        record = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise invalid(name, "be JSON", error, remedy) from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        rule = f'be an object of `"schema": "{SCHEMA}"`'
        raise invalid(name, rule, repr(record)[:60], remedy)
    version = record.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        rule = f"be of a version from 1 to {VERSION}"
        newer = "Upgrade evenstep, or write it again by `evenstep doctor --out`."
        raise invalid(name, rule, repr(version)[:60], newer)
    try:
        checkup = from_record(Checkup, record.get("checkup"), "checkup")
        _check(checkup)
    except ValueError as error:
        raise invalid(name, "hold a checkup", error, remedy) from error
    return checkup


def from_record(kind: type[Value], record: Any, where: str = "", *, lenient: bool = False) -> Value:
    """Return the value of a dataclass from what JSON made of it.

    Args:
        kind: the dataclass.
        record: objects, lists and plain values.
        where: what it is called in errors.
        lenient: whether a rank of another version may have sent it. Fields that are unknown are
            passed over then, and those that are missing take their defaults.

    Raises:
        ValueError: a field is missing, unknown or of another type; the message says where.
    """
    named = where or kind.__name__
    made: Value = _value(kind, _known(kind, record) if lenient else record, named)
    return made


def _known(kind: Any, given: Any) -> Any:
    """Return a record with the fields that a dataclass has, and with its defaults."""
    if not (is_dataclass(kind) and isinstance(given, dict)):
        return given
    hints, known = get_type_hints(kind), {}
    for field in fields(kind):
        if field.name in given:
            known[field.name] = _known(hints[field.name], given[field.name])
        elif field.default is not MISSING:
            known[field.name] = field.default
    return known


def _value(kind: Any, given: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _object(kind, given, where)
    if origin in (Union, types.UnionType):
        (other,) = (each for each in inner if each is not type(None))
        return None if given is None else _value(other, given, where)
    if origin is tuple and isinstance(given, list):
        return tuple(_value(inner[0], each, f"{where}[{at}]") for at, each in enumerate(given))
    if origin is dict and isinstance(given, dict):
        return {name: _value(inner[1], each, f"{where}.{name}") for name, each in given.items()}
    if kind is float and type(given) in (int, float) and math.isfinite(given):
        return float(given)
    if kind in (int, str, bool) and type(given) is kind:
        return given
    raise ValueError(
        f"{where} is {repr(given)[:40]}, which is no {getattr(kind, '__name__', kind)}"
    )


def _object(kind: Any, given: Any, where: str) -> Any:
    hints, known = get_type_hints(kind), [field.name for field in fields(kind)]
    if not isinstance(given, dict) or given.keys() ^ set(known):
        odd = sorted(given.keys() ^ set(known)) if isinstance(given, dict) else repr(given)[:40]
        raise ValueError(f"{where} has fields missing or unknown: {odd}")
    return kind(**{name: _value(hints[name], given[name], f"{where}.{name}") for name in known})


def _check(checkup: Checkup) -> None:
    """Refuse what no checkup has.

    Raises:
        ValueError: ranks or times cannot be.
    """
    known = [facts.rank for facts in checkup.ranks]
    if len(set(known)) < len(known) or not set(known) <= set(range(checkup.world_size)):
        raise ValueError(f"ranks are {known} of {checkup.world_size}")
    named = {rank for link in checkup.links for rank in (link.receiver, link.sender)}
    named |= {pace.rank for pace in checkup.paces}
    if not named <= set(known):
        raise ValueError(f"nothing is known of ranks {sorted(named - set(known))}")
    for pace in checkup.paces:
        right = len(pace.sizes) == len(pace.seconds)
        if not right or min(pace.sizes, default=1) < 1 or min(pace.seconds, default=1) <= 0:
            raise ValueError(f"the times of rank {pace.rank} are not one above 0 for each size")
    if any(link.bytes_per_s < 0 or link.round_trip_s < 0 for link in checkup.links):
        raise ValueError("a link is slower than 0")
    if checkup.global_batch_size < 1:
        raise ValueError(f"global_batch_size is {checkup.global_batch_size}")
