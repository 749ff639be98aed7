"""Tables as plain text and as Markdown: aligned, of any width, the same in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Row = Sequence[str]


def text_table(header: Row, rows: Iterable[Row], *, left: int = 1) -> str:
    """Return a table for a terminal.

    Args:
        header: names of the columns.
        rows: their cells.
        left: how many columns are words, and begin at the left; the rest are numbers.
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Row) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        texts = [
            f"{cell:<{wide}}" if at < left else f"{cell:>{wide}}" for at, (cell, wide) in pairs
        ]
        return "  ".join(texts).rstrip()

    return "\n".join(map(line, lines))


def markdown_table(header: Row, rows: Iterable[Row], *, left: int = 1) -> str:
    """Return the same as Markdown; ``left`` as for ``text_table``."""
    rule = ["---" if at < left else "---:" for at in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def percent(share: float) -> str:
    """Return a share as percent, with a decimal where it is small: 0.3, 4.9, 12, 139."""
    value = 100 * share
    # Rounded first, so that 9.96 is not written 10.0; no minus before a zero.
    return f"{round(value, 1) + 0.0:.1f}" if abs(round(value, 1)) < 10 else f"{value:.0f}"


def seconds(value: float) -> str:
    """Return a time with three digits, and its unit."""
    return f"{number(1e3 * value)} ms" if value < 1 else f"{number(value)} s"


def number(value: float) -> str:
    """Return a number with three digits, without an exponent where it can be read."""
    return f"{value:.3g}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.0f}"
