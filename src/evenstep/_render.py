"""Tables, sentences and numbers as text: aligned, the same in a terminal and in a pipe."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from io import TextIOWrapper
from typing import TextIO

Row = Sequence[str]


def terminal_width() -> int | None:
    """Return the columns of the terminal; None in a pipe or a file, whose lines have any length."""
    return shutil.get_terminal_size((0, 0)).columns or None


def paragraph(text: str, width: int | None) -> str:
    """Return sentences in lines of ``width``, broken between words alone.

    What stands between backticks is to be typed as it stands, and is not broken at all.
    """
    if width is None:
        return text
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def text_table(header: Row, rows: Iterable[Row], *, left: int = 1, width: int | None = None) -> str:
    """Return a table for a terminal.

    One that is too wide has the names of its columns in several lines, then columns closer to
    each other. If that is not enough, it continues below itself, where the words in front stand
    again: no column is left out or cut.

    Args:
        header: names of the columns.
        rows: their cells.
        left: how many columns are words, and begin at the left; the rest are numbers.
        width: of the terminal; None is any.
    """
    columns = [list(column) for column in zip(header, *rows, strict=True)]
    heads = [[column[0]] for column in columns]
    if width is not None and _wide([max(map(len, column)) for column in columns]) > width:
        heads = [_broken(column) for column in columns]
    height = max(map(len, heads))
    full = [
        [*[""] * (height - len(head)), *head, *column[1:]]
        for head, column in zip(heads, columns, strict=True)
    ]
    widths = [max(map(len, column)) for column in full]
    gap = 1 if width is not None and _wide(widths) > width else 2
    groups = _groups(widths, left, width, gap)
    return "\n\n".join(_aligned([full[at] for at in group], left, gap) for group in groups)


def _wide(widths: Sequence[int], gap: int = 2) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _broken(column: Sequence[str]) -> list[str]:
    """Return a column's name in lines as long as its longest cell, or its own longest word."""
    longest = max(1, *map(len, [*column[0].split(), *column[1:]]))
    return textwrap.wrap(column[0], longest, break_long_words=False) or [""]


def _groups(widths: Sequence[int], left: int, width: int | None, gap: int) -> Iterator[list[int]]:
    """Yield the columns that stand beside each other, the first ``left`` in each."""
    words = list(range(left))
    group = words.copy()
    for at in range(left, len(widths)):
        beside = [widths[each] for each in (*group, at)]
        if width is not None and _wide(beside, gap) > width and len(group) > left:
            yield group
            group = words.copy()
        group.append(at)
    yield group


def _aligned(columns: Sequence[Sequence[str]], left: int, gap: int) -> str:
    padded = []
    for at, column in enumerate(columns):
        width = max(map(len, column))
        align = str.ljust if at < left else str.rjust
        padded.append([align(cell, width) for cell in column])
    return "\n".join((" " * gap).join(cells).rstrip() for cells in zip(*padded, strict=True))


def spare_strictness(stream: TextIO | None) -> None:
    """Have a stream write `?` for signs that its encoding lacks, where it would raise."""
    if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="replace")


def printable(text: str) -> str:
    """Return ``text`` without what a terminal would obey: it may be another's."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def percent(share: float) -> str:
    """Return a share as percent, with a decimal where it is small: 0.3, 4.9, 12, 139."""
    value = 100 * share
    # Rounded first, so that 9.96 is not written 10.0; no minus before a zero.
    return f"{round(value, 1) + 0.0:.1f}" if abs(round(value, 1)) < 10 else f"{value:.0f}"


def seconds(value: float) -> str:
    """Return a time with three digits, and its unit."""
    return f"{number(1e3 * value)} ms" if abs(value) < 1 else f"{number(value)} s"


def number(value: float) -> str:
    """Return a number with three digits, without an exponent."""
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text else text


def counted(num: int, thing: str) -> str:
    """Return how many there are: ``1 step``, ``1,000 steps``."""
    return f"{num:,} {thing}{'' if num == 1 else 's'}"


def clock(seconds: float) -> str:
    """Return a stretch of time in minutes and seconds: ``1:05``."""
    whole = round(max(0.0, seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def ratio(value: float) -> str:
    """Return a speed as a person writes it: ``1/3`` rather than 0.333."""
    near = Fraction(value).limit_denominator(12)
    return str(near) if abs(float(near) - value) < 1e-3 * value else number(value)


def sizes(batch_size: Sequence[int]) -> str:
    """Return batch sizes as ``48 + 24 + 16 + 8``."""
    return " + ".join(map(str, batch_size))
