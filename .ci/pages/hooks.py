"""Has the built pages work from a folder: without a server, a network, or a script for formulas.

Formulas become MathML, which browsers draw by themselves. The index of the search becomes a script
(`theme/search/main.js` says why). The colours of code are written out for light and dark pages.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from pygments.formatters import HtmlFormatter

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Return a page with its formulas as MathML."""
    return _FORMULA.sub(_mathml, content)


def on_post_build(config: Any) -> None:
    """Write what only a server could hand out: the index of the search, and the colours of code."""
    site = Path(config.site_dir)
    index = site / "search" / "search_index.json"
    script = f"var search_index = {index.read_text('utf-8')};\n"
    index.with_suffix(".js").write_text(script, "utf-8")
    for unused in (index, site / "search" / "worker.js"):
        unused.unlink()
    light, dark = (_colours(style) for style in ("default", "github-dark"))
    colours = f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
    (site / "css" / "code.css").write_text(colours, "utf-8")


def _colours(style: str) -> str:
    return str(HtmlFormatter(style=style).get_style_defs(".codehilite"))


def _mathml(found: re.Match[str]) -> str:
    formula = html.unescape(found[2])
    if found[1] == "span":
        return str(convert(formula))
    return f"<p>{convert(formula, display='block')}</p>"
