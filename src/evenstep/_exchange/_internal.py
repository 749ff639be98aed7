"""Failures in optional parts never stop training: each is logged once, with its traceback."""

from __future__ import annotations

import logging
from contextlib import suppress

from .._planner import UserMistake, in_words

INTERNAL_FAULT = "internal fault of evenstep"
ALL_EQUAL = "All ranks go on with equal batch sizes for the rest of the run."


def log_fault(step: int | None, error: Exception, consequence: str) -> None:
    """Log with its traceback what failed.

    Args:
        step: optimizer step after which it was noticed; None where that is not known.
        error: what was raised; a ``UserMistake`` is no fault of evenstep's.
        consequence: how training continues, in a sentence.
    """
    what = fault_in_words(error) if step is None else f"Step {step}: {fault_in_words(error)}"
    request = "" if isinstance(error, UserMistake) else " Please report it, with this traceback."
    say("%s. %s%s", what, consequence, request, error=error)


def say(text: str, *values: object, error: Exception | None = None) -> None:
    """Warn, or log an error with its traceback, from a thread that has to continue.

    Handlers are the user's, and some raise.
    """
    level = logging.WARNING if error is None else logging.ERROR
    with suppress(Exception):
        logging.getLogger("evenstep").log(level, text, *values, exc_info=error)


def fault_in_words(error: Exception) -> str:
    """Return what failed, as a part of a sentence."""
    if isinstance(error, UserMistake):
        return f"{error.part} failed ({error})"
    return f"{INTERNAL_FAULT} ({in_words(error)})"
