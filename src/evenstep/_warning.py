"""Warnings that point to the line of the script that led to them."""

from __future__ import annotations

import sys
import warnings

from .exceptions import EvenstepWarning

_INSIDE = frozenset({"evenstep", "torch", "contextlib", "weakref"})  # packages of no script


def warn(text: str, kind: type[Warning] = EvenstepWarning) -> None:
    """Warn at the innermost line that is neither evenstep's nor torch's, or at the outermost.

    The backward of a GPU runs on a thread of torch's, which has no line of the script.

    Args:
        text: what is said.
        kind: ``UserWarning`` where torch would say the same.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, kind, stacklevel=level)


class OneWarning:
    """A warning that is given once, whatever the text.

    Attributes:
        said: whether it was.
    """

    def __init__(self) -> None:
        self.said = False

    def __call__(self, text: str) -> None:
        """Warn, unless that was done."""
        if not self.said:
            self.said = True
            warn(text)


def _is_inside(names: dict[str, object]) -> bool:
    return str(names.get("__name__")).partition(".")[0] in _INSIDE
