"""Checks of arguments. A rule is written once: it is what is checked, and what the error says."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .exceptions import invalid

_RANGE = re.compile(r"in ([\[(])(\S+), (\S+)([\])])")
_BOUND = re.compile(r"(at least|above) (\S+)")


def check_fields(owner: object, /, **rules: tuple[str, str]) -> None:
    """Raise unless every named field of ``owner`` keeps its rule.

    Usage:
        check_fields(self, alpha=("in (0, 1]", "1 keeps no memory, less keeps more."))

    Args:
        owner: the value that is being made; its class is named in the error.
        rules: by field, the rule as for ``check_range``, and the remedy.
    """
    for name, (rule, remedy) in rules.items():
        argument = f"{type(owner).__name__}({name}=...)"
        check_range(argument, getattr(owner, name), rule, remedy)


def check_range(argument: str, value: float, rule: str, remedy: str) -> None:
    """Raise unless a number keeps its rule.

    Args:
        argument: class or function and argument, for the message.
        value: what was given.
        rule: ``"positive"``, ``"at least 1"``, ``"above 1"`` or ``"in [0, 1)"``, with ``"finite
            and "`` in front where infinity is no answer, and ``"an integer of "`` where no
            fraction is.
        remedy: what to do instead.

    Raises:
        ValueError: it does not, or is NaN.
    """
    if not _keeps(value, rule):
        raise invalid(argument, f"be {rule}", value, remedy)


def _keeps(value: float, rule: str) -> bool:
    plain = rule.removeprefix("finite and ")
    if plain != rule and not math.isfinite(value):
        return False
    whole = plain.removeprefix("an integer of ")
    if whole != plain and not isinstance(value, int | np.integer):
        return False
    plain = whole
    if plain == "positive":
        return value > 0
    if bound := _BOUND.fullmatch(plain):
        least = float(bound[2])
        return value >= least if bound[1] == "at least" else value > least
    limits = _RANGE.fullmatch(plain)
    assert limits is not None, rule
    low, high = float(limits[2]), float(limits[3])
    above = value >= low if limits[1] == "[" else value > low
    return above and (value <= high if limits[4] == "]" else value < high)


def check_ranks(
    argument: str, value: NDArray[Any], valid: NDArray[np.bool_], rule: str, remedy: str
) -> None:
    """Raise, naming the first rank whose entry is not ``valid``, ``(world_size,)``."""
    if not valid.all():
        rank = int(np.argmin(valid))
        raise invalid(argument, f"{rule} on every rank", f"{value[rank]} on rank {rank}", remedy)


def own(value: ArrayLike, dtype: type[Any]) -> NDArray[Any]:
    """Return a read-only copy."""
    array = np.array(value, dtype)
    array.flags.writeable = False
    return array


def sizes_of(argument: str, value: ArrayLike) -> NDArray[np.int64]:
    """Return samples per rank, ``(world_size,)``.

    Raises:
        ValueError: they are no integers, or one is negative.
    """
    sizes = np.asarray(value)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (sizes < 0).any():
        remedy = "Count whole samples, one entry per rank."
        raise invalid(argument, "be integers of at least 0", value, remedy)
    return sizes.astype(np.int64)
