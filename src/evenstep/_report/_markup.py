"""Pieces of HTML, in which every text from a run is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

Cells = Sequence[str]
DASHES = ((), (8, 4), (2, 3), (10, 3, 2, 3))
"""Of lines, so that they can be told apart without their colors."""


def text(tag: str, words: str, *, kind: str = "") -> str:
    """Return words in a tag, with a class where one is given."""
    return f"<{tag}{f' class={kind}' if kind else ''}>{escape(words)}</{tag}>"


def table(caption: str, header: Cells, rows: Iterable[Cells], *, left: int = 1) -> str:
    """Return a table that scrolls on its own where it is wider than the screen.

    Args:
        caption: what it holds; says so as well if rows are left out.
        header: names of the columns.
        rows: their cells.
        left: columns of words; the others are numbers. One more may be words, as the last.
    """
    kinds = ['"w"' if at < left else "n" for at in range(len(header))]
    head = "".join(
        f"<th scope=col class={kind}>{escape(cell)}</th>"
        for cell, kind in zip(header, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + f"<th scope=row>{escape(row[0])}</th>"
        + "".join(
            f"<td class={kind}>{escape(cell)}</td>"
            for cell, kind in zip(row[1:], kinds[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class=scroll role=region tabindex=0 aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, html: str) -> str:
    """Return what is shown when it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>"


def key_figures(figures: Mapping[str, str]) -> str:
    """Return a few figures in large print."""
    pairs = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in figures.items()
    )
    return f"<dl class=figures>{''.join(pairs)}</dl>"


def chart(
    name: str,
    title: str,
    words: str,
    *,
    legend: Mapping[str, str],
    alternative: str,
    is_dashed: bool = False,
) -> str:
    """Return the frame of a chart, which the script fills, and its figures as a table.

    Args:
        name: under which the script finds the figures.
        title, words: above it: what it shows, and what to look for.
        legend: name of a color by label; ``"--heat"`` and ``"--cool"`` are scales of heat maps.
        is_dashed: whether lines of the legend are dashed, in the order that all charts have.
        alternative: tables, for whom the picture is of no use.
    """
    entries = "".join(
        f"<li>{_swatch(color, DASHES[at % len(DASHES)] if is_dashed else None)}{escape(label)}</li>"
        for at, (label, color) in enumerate(legend.items())
    )
    return (
        f'<figure aria-labelledby="{name}-title"><figcaption><strong id="{name}-title">'
        f"{escape(title)}</strong><p>{escape(words)}</p></figcaption>"
        f"<ul class=legend>{entries}</ul>"
        f'<div class=plot data-chart="{name}" role=img '
        f'aria-label="{escape(f"Chart: {title}. {words} The table below it has the figures.")}">'
        "</div><div class=read>"
        f'<label for="{name}-at">Read at</label>'
        f'<input type=range id="{name}-at" min=0 max=1 value=0 aria-label="{escape(title)}: step">'
        f'<output for="{name}-at"></output>'
        f"<label class=peaks hidden><input type=checkbox> Show the highest peaks</label></div>"
        f"{folded('Figures of this chart as a table', alternative)}</figure>"
    )


def _swatch(color: str, dash: Sequence[int] | None) -> str:
    if color in ("--heat", "--cool"):
        return f"<span class=scale data-colors={color[2:]}></span> "
    if dash is None:
        return f'<span class=swatch style="background:var({color})"></span>'
    look = f'stroke="var({color})" stroke-width=3 stroke-dasharray="{" ".join(map(str, dash))}"'
    line = f"<line x1=0 y1=5 x2=30 y2=5 {look} />"
    return f"<svg width=30 height=10 aria-hidden=true>{line}</svg> "
