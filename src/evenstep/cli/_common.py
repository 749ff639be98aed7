"""What the commands share: options read as lists, refusals, modules in the current folder."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import NoReturn, TypeVar

import typer

from .._render import paragraph, terminal_width
from ..exceptions import invalid

Value = TypeVar("Value")

_SMALLEST, _LARGEST = 1e-18, 1e18  # sums and products of such numbers are finite


def fail(message: str, code: int) -> NoReturn:
    """End the command with a message on stderr: what it printed so far may be read by a program."""
    typer.echo(paragraph(f"Error: {message}", terminal_width()), err=True)
    raise typer.Exit(code)


def refused(command: str, option: str, rule: str, got: object, remedy: str) -> ValueError:
    """Return the error for an option, in the form that all errors have."""
    return invalid(f"evenstep {command} {option}", rule, got, remedy)


_OF_RUN = "Give what `Runtime(run_dir=...)` was given."


def unread(
    command: str, argument: str, run: object, error: OSError, remedy: str = _OF_RUN
) -> ValueError:
    """Return the error for what a run or a command has written, and cannot be read."""
    got = f"{error.filename or run} ({error.strerror or error})"
    return refused(command, argument, "name a file that can be read", got, remedy)


def unwritten(command: str, file: Path, error: OSError, *, example: str) -> ValueError:
    """Return the error for an output that cannot be written."""
    got, remedy = f"{file} ({error.strerror or error})", f"Give another one: `--output {example}`."
    return refused(command, "--output", "be a file to write", got, remedy)


def spare(command: str, events: Path, file: Path, *, example: str) -> None:
    """Refuse to write over the events, under whatever name."""
    if os.path.exists(file) and os.path.exists(events) and os.path.samefile(file, events):
        rule, remedy = "name another file than the events", f"Leave it out for `{example}`."
        raise refused(command, "--output", rule, file, remedy)


def import_from_here() -> None:
    """Find modules in the current folder, as ``python -m`` does and an installed script does not.

    Processes that are started later are given it as well.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def names(command: str, option: str, text: str) -> tuple[str, ...]:
    """Return what stands between the commas, each once and none empty."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts) or len(set(parts)) < len(parts):
        remedy = "Put a single comma between two."
        raise refused(command, option, "hold names, each of them once", repr(text), remedy)
    return parts


def numbers(command: str, option: str, text: str, *, positive: bool = True) -> tuple[float, ...]:
    """Return the numbers between the commas, fractions such as 1/3 too."""
    try:
        found = tuple(float(Fraction(part.strip())) for part in text.split(","))
    except (ValueError, ZeroDivisionError, OverflowError):
        found = (math.nan,)
    low = _SMALLEST if positive else 0.0
    if not all(low <= number <= _LARGEST for number in found):
        kind = "positive numbers" if positive else "numbers"
        rule = f"be {kind} from {low:g} to {_LARGEST:g} with commas between"
        remedy = "An example is 100,80,20; fractions such as 1/3 are accepted."
        raise refused(command, option, rule, repr(text), remedy)
    return found


def counts(command: str, option: str, text: str) -> tuple[int, ...]:
    """Return the whole numbers from 1 between the commas."""
    found = numbers(command, option, text)
    if any(number != int(number) for number in found):
        remedy = "Samples come whole."
        raise refused(command, option, "be whole numbers with commas between", repr(text), remedy)
    return tuple(int(number) for number in found)


def spread(
    command: str, option: str, values: Sequence[Value], num_workers: int, *, of: str = "workers"
) -> tuple[Value, ...]:
    """Return one value for each worker; a single one stands for all."""
    if len(values) not in (1, num_workers):
        rule = f"hold one number, or one for each of the {num_workers} {of}"
        raise refused(command, option, rule, f"{len(values)} of them", "Leave none out.")
    return tuple(values) * (num_workers if len(values) == 1 else 1)


def least(command: str, option: str, value: int, bound: int, remedy: str) -> int:
    """Return ``value``, which has to be at least ``bound``."""
    if value < bound:
        raise refused(command, option, f"be at least {bound}", value, remedy)
    return value


def within(command: str, option: str, value: float, low: float, high: float, remedy: str) -> None:
    """Raise unless ``value`` is from ``low`` to ``high``; NaN is not."""
    if not low <= value <= high:
        raise refused(command, option, f"be from {low:,} to {high:,}", value, remedy)


def check_ends(command: str, option: str, file: Path, remedy: str) -> None:
    """Raise for what can be read without end, such as ``/dev/zero``."""
    if os.path.exists(file) and not (file.is_file() or file.is_dir() or file.is_fifo()):
        raise refused(command, option, "be a file or a pipe", file, remedy)
