"""Curves in a terminal: braille dots for one, marks on top of them for the other."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a cell


def draw(
    line: Sequence[float],
    marked: Sequence[float],
    *,
    width: int = 64,
    height: int = 9,
    styles: tuple[str, str] = ("red", "green"),
) -> Text:
    """Return both curves over the same axes, ``line`` as dots and ``marked`` as circles on it.

    Args:
        line: values at 0, 1, 2, ..., at least two.
        marked: as many values.
        width: columns for the curves; the axis takes 7 more.
        height: rows for the curves.
        styles: of the line and of the marks.
    """
    low, high = min(*line, *marked), max(*line, *marked)
    span = (high - low) or 1.0

    cells = [[0] * width for _ in range(height)]
    for dot_x in range(2 * width):
        dot_y = round((high - _at(line, dot_x / (2 * width - 1))) / span * (4 * height - 1))
        cells[dot_y // 4][dot_x // 2] |= _DOTS[dot_y % 4][dot_x % 2]

    marks = set()
    for x in range(2, width, 6):
        y = (high - _at(marked, x / (width - 1))) / span * (4 * height - 1)
        marks.add((round(y) // 4, x))

    picture = Text()
    for row in range(height):
        label = {0: f"{high:6.2f} ", height - 1: f"{low:6.2f} "}.get(row, " " * 7)
        picture.append(label, "dim")
        for column in range(width):
            if (row, column) in marks:
                picture.append("o", f"bold {styles[1]}")
            elif cells[row][column]:
                picture.append(chr(0x2800 + cells[row][column]), styles[0])
            else:
                picture.append(" ")
        picture.append("\n")
    picture.append(f"{'':7}step 0{'':{max(1, width - 10 - len(str(len(line))))}}{len(line)}", "dim")
    return picture


def _at(values: Sequence[float], place: float) -> float:
    """Return the curve's value at ``place`` in [0, 1] of its length, between points by line."""
    position = place * (len(values) - 1)
    left = min(int(position), len(values) - 2)
    share = position - left
    return values[left] * (1 - share) + values[left + 1] * share
