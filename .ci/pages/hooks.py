"""Has the built pages work from a folder: without a server, a network, or a script for formulas.

Formulas become MathML, which browsers draw by themselves. The index of the search becomes a script
(`theme/search/main.js` says why). Highlighting and addresses of pages are settings in `mkdocs.yml`.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Return a page with its formulas as MathML."""
    return _FORMULA.sub(_mathml, content)


def on_post_build(config: Any) -> None:
    """Write the index of the search as a script, in place of what only a server can hand out."""
    folder = Path(config.site_dir) / "search"
    index = folder / "search_index.json"
    (folder / "search_index.js").write_text(f"var search_index = {index.read_text('utf-8')};\n")
    for unused in (index, folder / "worker.js"):
        unused.unlink()


def _mathml(found: re.Match[str]) -> str:
    formula = html.unescape(found[2])
    if found[1] == "span":
        return str(convert(formula))
    return f"<p>{convert(formula, display='block')}</p>"
