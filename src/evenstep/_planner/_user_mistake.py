"""Whose mistake an exception is: that of a policy or a reader of the user's, or evenstep's own."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import Any, final

_NEUTRAL = {__name__.partition(".")[0], "builtins", "numpy"}
_MOST_CHARACTERS = 300  # of an exception's message: it goes into another text
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)+(\w.*)")


class UserMistake(Exception):
    """What a user gave, such as a policy, raised or broke its contract.

    Attributes:
        part: its class.
    """

    def __init__(self, problem: str, part: str) -> None:
        super().__init__(problem)
        self.part = part


@final
class blaming:  # a class: several are entered in each step, and a generator takes longer
    """Turn what is raised in the block into a mistake of ``part``, unless it is evenstep's own.

    Only calls of the part, and checks of what it returned, belong into the block.

    Raises:
        UserMistake: the part is a user's. One of evenstep's own raises as it did.
    """

    __slots__ = ("_part",)

    def __init__(self, part: Any) -> None:
        self._part = part

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not is_own(self._part):
            raise UserMistake(in_words(error), type(self._part).__name__) from error


def is_own(value: Any) -> bool:
    """Tell whether a policy or a reader is evenstep's own, with all that it is made of.

    A wrapper of evenstep's around a user's policy is not: what it returns is made by both.
    """
    module = getattr(value, "__module__", "builtins")
    if module.partition(".")[0] not in _NEUTRAL:
        return False
    if isinstance(value, tuple | list):
        return all(map(is_own, value))
    if isinstance(value, dict):
        return all(map(is_own, value.values()))
    if is_dataclass(value):
        return all(is_own(getattr(value, field.name)) for field in fields(value))
    return True


def in_words(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message, not too long.

    Where the message has a traceback of Python's, as those of TensorFlow's graphs and of torch's
    loader workers, its last line stands for the exception: what went wrong in the user's code.
    """
    try:
        text = str(error).strip()
    except Exception:  # of a user's class
        text = ""
    inner = _TRACEBACK.search(text)
    if inner is not None:
        return _shortened(inner[1])
    name = type(error).__name__
    return f"{name}: {_shortened(text.splitlines()[0])}" if text else name


def _shortened(line: str) -> str:
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."
