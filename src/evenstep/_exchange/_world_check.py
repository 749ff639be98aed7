"""Whether all ranks were given the same, judged by what each of them states about itself."""

from __future__ import annotations

import functools
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from types import CodeType
from typing import Any

Facts = Mapping[str, Mapping[str, str]]
"""What a rank states: for each part (``""``, ``"loader 2"``), name to value, both as shown."""

_LONGEST = 160  # characters of a value in an error
_MOST = 4  # values of one setting in an error
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def difference(stated: Sequence[Facts], remedies: Mapping[str, str]) -> str | None:
    """Return the text of the one error that names all in which ranks differ, or None.

    What a rank does not state is not compared for that rank.

    Args:
        stated: by rank.
        remedies: what to do about it, by name.
    """
    lines = []
    for part, name in differing(stated):
        values = [rank.get(part, {}).get(name) for rank in stated]
        lines.append(refusal(name, values, remedies.get(name, "Set it alike."), part=part))
    return "\n".join(lines) or None


def differing(stated: Sequence[Facts]) -> list[tuple[str, str]]:
    """Return the part and the name of all in which ranks differ, in the order stated."""
    names = dict.fromkeys((part, name) for rank in stated for part in rank for name in rank[part])
    return [
        (part, name)
        for part, name in names
        if len({rank[part][name] for rank in stated if name in rank.get(part, {})}) > 1
    ]


def refusal(name: str, values: Sequence[str | None], remedy: str, *, part: str = "") -> str:
    """Return the sentence about one difference: the setting, the values, which ranks have which.

    Args:
        name: what differs, as the subject of the sentence.
        values: by rank; None on a rank that states none.
        remedy: what to do about it.
        part: whose setting it is, where there are several.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks_of.setdefault(value, []).append(rank)
    held = [f"{cut(value, _LONGEST)} on {listed(ranks)}" for value, ranks in ranks_of.items()]
    if len(held) > _MOST:
        held[_MOST - 1 :] = [f"{len(held) - _MOST + 1} other values on the other ranks"]
    got = f"{', '.join(held[:-1])} and {held[-1]}"
    subject = f"{name} ({part})" if part else name
    return f"{subject} must be the same on all ranks, got {got}. {remedy}"


def first_different(listings: Sequence[Mapping[str, str]]) -> tuple[str, list[str]]:
    """Return the first entry in which long listings differ, and its value on every rank."""
    names = dict.fromkeys(name for listing in listings for name in listing)
    for name in names:
        values = [listing.get(name, "none") for listing in listings]
        if len(set(values)) > 1:
            return name, values
    return "the order", [", ".join(listing) for listing in listings]


def digest(texts: Iterable[str]) -> str:
    """Return a checksum of a long listing."""
    checksum = 0
    for text in texts:
        checksum = zlib.crc32(text.encode(errors="replace") + b"\0", checksum)
    return f"checksum {checksum:08x}"


def described(value: Any) -> str:
    """Return a text of ``value`` that equal settings have in common in every process."""
    if is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name, None)) for field in fields(value)]
        return f"{type(value).__qualname__}({', '.join(f'{k}={described(v)}' for k, v in items)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{k!r}: {described(v)}" for k, v in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(described, value))) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(described, value)) + ")"
    if callable(value):
        return qualified(value)
    try:
        own = "__repr__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
        return _ADDRESS.sub("", repr(value)) if own else qualified(type(value))
    except Exception:  # of the user's own `__repr__`
        return qualified(type(value))


def qualified(value: Any) -> str:
    """Return the name of a function or a class; of any other object, that of its class."""
    if isinstance(value, functools.partial):
        return f"partial({qualified(value.func)})"
    named = value if hasattr(value, "__qualname__") else type(value)
    module = str(getattr(named, "__module__", ""))
    # The script is `__main__` where it was started, and `__mp_main__` where it was spawned.
    return named.__qualname__ if module.endswith("main__") else f"{module}.{named.__qualname__}"


def code_of(function: Any) -> dict[str, str]:
    """Return a checksum of a function's code, under the one Python that it can be compared in."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return {}
    version = ".".join(map(str, sys.version_info[:3]))
    return {version: digest(_parts(code))}


def _parts(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _parts(const)
        else:
            yield described(const)


def cut(text: str, longest: int) -> str:
    """Return a text of at most ``longest`` characters: the beginning of a longer one."""
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


def listed(ranks: Sequence[int]) -> str:
    """Return ``"rank 1"``, ``"ranks 0, 2"`` or ``"ranks 0 to 6, 9"``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    starts = [ranks[0], *(after for before, after in pairwise(ranks) if after != before + 1)]
    ends = [*(before for before, after in pairwise(ranks) if after != before + 1), ranks[-1]]
    texts: list[str] = []
    for start, end in zip(starts, ends, strict=True):
        if end - start >= 2:
            texts.append(f"{start} to {end}")
        else:
            texts += map(str, range(start, end + 1))
    return f"ranks {', '.join(texts)}"
